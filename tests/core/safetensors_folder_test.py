"""Model folders: bits, slices, shards, and every way to be broken."""

import json
import pathlib

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from swe17_jax.core import safetensors_folder as sf


def _tensors():
  generator = np.random.default_rng(0)
  raw = generator.integers(0, 2**16, (5, 6), dtype=np.uint16)
  return {
    # Any bits, NaN payloads and -0 among them.
    'a.weight': raw.view(ml_dtypes.bfloat16),
    'b.weight': generator.standard_normal((4, 3)).astype(np.float32),
    'c.bias': np.asarray([1, -2], np.float16),
  }


class FolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'model'

  def _write(self, **kwargs):
    sf.write_folder(self.path, {'x': 1}, _tensors().items(), **kwargs)

  @parameterized.named_parameters(
    ('one_file', 10**9, ['model.safetensors']),
    # 60, 48 and 4 bytes: the second and third share a file of 64.
    (
      'two_files',
      64,
      [
        'model-00001-of-00002.safetensors',
        'model-00002-of-00002.safetensors',
        'model.safetensors.index.json',
      ],
    ),
  )
  def test_bits_come_back(self, max_shard_bytes, files):
    self._write(max_shard_bytes=max_shard_bytes)
    self.assertEqual(
      sorted(p.name for p in self.path.iterdir()), ['config.json', *files]
    )
    folder = sf.open_folder(self.path)
    self.assertEqual(folder.config, {'x': 1})
    self.assertCountEqual(folder.names, _tensors())
    for name, array in _tensors().items():
      found = folder.read(name)
      self.assertEqual(found.dtype, array.dtype)
      self.assertEqual(folder.shapes[name], array.shape)
      self.assertEqual(found.tobytes(), array.tobytes())

  def test_index_holds_total_bytes_and_the_file_of_each_tensor(self):
    self._write(max_shard_bytes=64)
    index = json.loads((self.path / 'model.safetensors.index.json').read_text())
    second = 'model-00002-of-00002.safetensors'
    self.assertEqual(index['metadata'], {'total_size': 60 + 48 + 4})
    self.assertEqual(index['weight_map']['b.weight'], second)
    self.assertEqual(index['weight_map']['c.bias'], second)

  def test_slices(self):
    self._write()
    folder = sf.open_folder(self.path)
    a = _tensors()['a.weight']
    for index in (
      (slice(1, 3),),
      (slice(None), slice(2, 6)),
      (slice(0, 5), slice(0, 0)),
      (slice(4, None), slice(None, 1)),
    ):
      found = folder.read_slice('a.weight', index)
      self.assertEqual(found.shape, a[index].shape)
      self.assertEqual(found.tobytes(), a[index].tobytes())

  def test_a_transposed_view_is_stored_by_its_values(self):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    sf.write_folder(self.path, {}, [('t', array)])
    np.testing.assert_array_equal(sf.open_folder(self.path).read('t'), array)

  def test_an_interrupted_write_leaves_nothing_under_the_name(self):
    def broken():
      yield 'a', np.zeros(3)
      raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      sf.write_folder(self.path, {}, broken(), max_shard_bytes=1)
    self.assertFalse(self.path.exists())
    self._write()
    self.assertCountEqual(sf.open_folder(self.path).names, _tensors())

  def test_what_is_there_is_not_overwritten(self):
    self._write()
    with self.assertRaisesRegex(sf.FolderError, 'exists and is not empty'):
      self._write()

  def test_a_name_that_comes_twice(self):
    with self.assertRaisesRegex(sf.FolderError, "'a' comes twice"):
      sf.write_folder(self.path, {}, [('a', np.ones(1)), ('a', np.ones(1))])

  def test_a_file_cut_off_anywhere_is_refused(self):
    self._write()
    file = self.path / 'model.safetensors'
    whole = file.read_bytes()
    for size in (0, 5, 8, 50, len(whole) - 1):
      file.write_bytes(whole[:size])
      with self.assertRaisesRegex(
        sf.FolderError, rf'model.safetensors \({size} bytes\) is cut off'
      ):
        sf.open_folder(self.path)

  def test_a_missing_shard_and_a_tensor_that_no_shard_holds(self):
    self._write(max_shard_bytes=64)
    index = self.path / 'model.safetensors.index.json'
    content = json.loads(index.read_text())
    content['weight_map']['d'] = 'model-00001-of-00002.safetensors'
    index.write_text(json.dumps(content))
    with self.assertRaisesRegex(sf.FolderError, "lists 1 .* first 'd' in mod"):
      sf.open_folder(self.path)
    (self.path / 'model-00002-of-00002.safetensors').unlink()
    with self.assertRaisesRegex(sf.FolderError, '00002.safetensors is missing'):
      sf.open_folder(self.path)

  @parameterized.named_parameters(
    ('no_config', None, 'config.json is missing'),
    ('bad_json', '{', 'config.json is not readable JSON'),
    ('list', '[]', 'config.json must hold a JSON object'),
  )
  def test_config_json(self, text, message):
    self._write()
    (self.path / 'config.json').unlink()
    if text is not None:
      (self.path / 'config.json').write_text(text)
    with self.assertRaisesRegex(sf.FolderError, message):
      sf.open_folder(self.path)

  def test_unknown_name(self):
    self._write()
    with self.assertRaisesRegex(sf.FolderError, "no tensor 'z'"):
      sf.open_folder(self.path).read('z')


if __name__ == '__main__':
  absltest.main()
