"""`plan` for every shape of chain, and manifests that say what is wrong."""

import dataclasses
import itertools
import json

import pytest
import xxhash
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.core import storage
from swe17_jax.weights import manifest as manifests

DIGEST = '0' * 32
BLOB = {
  'name': 'a',
  'size': 3,
  'digest': DIGEST,
  'chunk_bytes': 4,
  'chunks': [DIGEST],
}


def make(version, parent=None):
  kind = 'base' if parent is None else 'delta'
  return manifests.Manifest(
    version=version,
    parent_version=parent,
    kind=kind,
    codec='swe17.delta.2',
    blobs=(manifests.make_blob(kind, version=version, data=b'abc'),),
    parent_digest=None if parent is None else DIGEST,
    tensors_digest=DIGEST,
    created_by='trainer-0:17',
    started_at=1e9,
    committed_at=1e9 + 2.5,
  )


def chain(parents):
  """{version: parent or None} -> available manifests."""
  return {version: make(version, parent) for version, parent in parents.items()}


def planned(have, parents):
  return [m.version for m in manifests.plan(have, chain(parents))]


class PlanTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('nothing_published', None, {}, []),
    ('nothing_new', 3, {2: None, 3: 2}, []),
    ('next_delta', 3, {4: 3}, [4]),
    ('several_deltas', 3, {2: None, 3: 2, 4: 3, 5: 4}, [4, 5]),
    ('deltas_rather_than_an_old_base', 3, {3: None, 4: 3}, [4]),
    ('late_start', None, {0: None, 1: 0, 2: None, 3: 2, 4: 3}, [2, 3, 4]),
    ('versions_may_skip', 4, {8: 4, 12: 8}, [8, 12]),
    ('missing_manifest_stops', 3, {5: 4, 6: 5}, []),
    ('stops_in_the_middle', 3, {4: 3, 6: 5, 7: 6}, [4]),
    ('base_bridges_a_gap', 3, {5: None, 6: 5}, [5, 6]),
    ('base_resets_what_came_before', 3, {4: 3, 5: None, 6: 5}, [5, 6]),
    ('gap_after_a_base', 3, {5: None, 7: 6}, [5]),
    ('no_base_to_start_from', None, {4: 3, 5: 4}, []),
    ('base_was_deleted', None, {3: None, 5: 4}, [3]),
    ('ahead_of_the_store', 9, {3: None, 4: 3}, []),
    ('a_fork_behind_a_base_is_history', 3, {4: 3, 5: 3, 6: None}, [6]),
  )
  def test_plan(self, have, parents, expected):
    assert planned(have, parents) == expected

  @parameterized.named_parameters(
    ('skips_ours', 3, {4: 2}),
    ('skips_a_published_one', 3, {4: 3, 5: 3}),
    ('behind_a_base', None, {1: None, 2: 1, 3: 1}),
    ('skips_a_base', 3, {4: None, 5: 3}),
  )
  def test_wrong_parent(self, have, parents):
    with pytest.raises(manifests.ManifestError, match='wrong parent'):
      planned(have, parents)

  @given(
    have=st.none() | st.integers(0, 12),
    bases=st.sets(st.integers(0, 12)),
    gone=st.sets(st.integers(0, 12)),
  )
  @settings(max_examples=200, deadline=None)
  def test_twin_that_searches_forward(self, have, bases, gone):
    """One publisher, versions 0..12, some manifests invisible."""
    parents = {
      v: None if v in bases or v == 0 else v - 1
      for v in range(13)
      if v not in gone
    }
    # Forward: a version is reached if it is a base or if its parent is.
    reached = {have} - {None}
    for version, parent in sorted(parents.items()):
      if version > (-1 if have is None else have):
        if parent is None or parent in reached:
          reached.add(version)
      elif have is None or parent is None:
        reached.add(version)
    newest = max(reached, default=None)
    plan = planned(have, parents)
    if newest == have:
      assert plan == []
      return
    assert plan[-1] == newest
    # Consistent: each link is a base in front or a delta of its predecessor.
    for before, version in itertools.pairwise([have, *plan]):
      assert parents[version] in (before, None)
    assert all(parents[version] is not None for version in plan[1:])
    # No base where deltas do.
    if have is not None and parents[plan[0]] is None:
      between = [parents.get(v) for v in range(have + 1, newest + 1)]
      assert None in between


class ManifestTest(parameterized.TestCase):
  def test_round_trip(self):
    for record in (make(3), make(12, 7)):
      data = record.to_bytes()
      assert manifests.Manifest.from_bytes(data) == record
      assert json.loads(data)['format'] == 'swe17.manifest.2'

  def test_names(self):
    assert manifests.name(17) == 'weights/manifest/00000017.json'
    # xxh3-128 of nothing, from the reference implementation.
    blob = manifests.make_blob('delta', version=17, data=b'')
    digest = '99aa06d3014798d86001c324468d497f'
    assert blob == manifests.Blob(
      f'weights/delta/00000017-{digest}', 0, digest, 1 << 24, ()
    )

  @parameterized.named_parameters(
    ('format', {'format': 'swe17.manifest.9'}, 'same release'),
    ('version', {'version': -1}, 'must be an int in'),
    ('version_digits', {'version': 10**8}, 'must be an int in'),
    ('version_type', {'version': '3'}, 'must be an int in'),
    ('version_bool', {'version': True}, 'must be an int in'),
    ('kind', {'kind': 'patch'}, 'not in'),
    ('base_with_parent', {'parent_version': 2}, 'a base has no parent'),
    ('delta_alone', {'kind': 'delta'}, 'must be an int in'),
    ('own_parent', {'kind': 'delta', 'parent_version': 3}, 'must be an int in'),
    ('no_blobs', {'blobs': []}, 'must not be empty'),
    ('blobs_no_list', {'blobs': 3}, 'must be a list'),
    ('blob_no_object', {'blobs': [3]}, 'must be a JSON object'),
    ('blob_fields', {'blobs': [{'name': 'a'}]}, "lacks .'chunk_bytes'"),
    (
      'blob_size',
      {'blobs': [BLOB | {'size': -1}]},
      'size=-1',
    ),
    (
      'blob_chunks',
      {'blobs': [BLOB | {'size': 5}]},
      'of 5 bytes must have 2 chunks of 4, not 1',
    ),
    ('chunk_digest', {'blobs': [BLOB | {'chunks': [7]}]}, 'chunks.0.=7'),
    ('chunks_no_list', {'blobs': [BLOB | {'chunks': 7}]}, 'must be a list'),
    ('base_with_digest', {'parent_digest': DIGEST}, 'has no parent_digest'),
    (
      'delta_without_digest',
      {'kind': 'delta', 'parent_version': 1},
      'parent_digest=None',
    ),
    ('time', {'committed_at': -1}, 'must be seconds'),
    (
      'chunk_bytes',
      {'blobs': [BLOB | {'chunk_bytes': 0}]},
      'must be an int > 0',
    ),
    ('digest', {'tensors_digest': 'XYZ'}, '32 lower-case'),
    ('created_by', {'created_by': None}, 'no text'),
    ('unknown', {'colour': 'red'}, "unknown .'colour'"),
  )
  def test_bad_field(self, change, message):
    fields = dataclasses.asdict(make(3)) | change
    with pytest.raises(manifests.ManifestError, match=message):
      manifests.Manifest.from_bytes(json.dumps(fields).encode())

  @parameterized.parameters(b'', b'{', b'[]', b'null', b'\xff', b'{}')
  def test_bad_json(self, data):
    with pytest.raises(manifests.ManifestError):
      manifests.Manifest.from_bytes(data)

  def test_blob_check(self):
    blob = manifests.make_blob('base', version=1, data=b'abc')
    blob.check(b'abc')
    for data in (b'abd', b'ab', b''):
      with pytest.raises(manifests.ManifestError, match='fetch it again'):
        blob.check(data)

  def test_chunks_by_hand(self):
    blob = manifests.make_blob('base', version=1, data=b'abcde', chunk_bytes=2)
    assert [blob.span(i) for i in range(3)] == [(0, 2), (2, 4), (4, 5)]
    assert blob.chunks == tuple(
      xxhash.xxh3_128_hexdigest(part) for part in (b'ab', b'cd', b'e')
    )
    blob.check_chunk(2, b'e')
    for chunk, data in ((0, b'cd'), (2, b'e '), (1, b'')):
      with pytest.raises(manifests.ManifestError, match='fetch them again'):
        blob.check_chunk(chunk, data)

  def test_a_delta_of_other_weights_than_its_parent(self):
    available = chain({3: None, 4: 3})
    available[4] = dataclasses.replace(available[4], parent_digest='1' * 32)
    with pytest.raises(manifests.ManifestError, match='two publishers'):
      manifests.plan(None, available)


class StoreTest(parameterized.TestCase):
  def test_read_and_list(self):
    store = storage.MemoryStore()
    for record in (make(9), make(10, 9), make(12_345_678, 10)):
      store.write_once(manifests.name(record.version), record.to_bytes())
    store.write_once('weights/manifest/notes.txt', b'')
    assert manifests.read(store, version=10) == make(10, 9)
    assert manifests.versions(store, after=9) == [10, 12_345_678]
    assert manifests.versions(store) == [9, 10, 12_345_678]
    with pytest.raises(storage.ObjectNotFound):
      manifests.read(store, version=11)

  def test_copied_by_hand(self):
    store = storage.MemoryStore()
    store.write_once(manifests.name(5), make(4).to_bytes())
    with pytest.raises(manifests.ManifestError, match='says version 4'):
      manifests.read(store, version=5)
