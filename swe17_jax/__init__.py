"""Asynchronous reinforcement learning of coding agents, as a ring.

    task -> rollout -> record -> batch -> loss -> optimizer -> weights -> delta
     ^                                                                      |
     |                                                                      v
     +------------- next rollout, with a newer weight_version <--------- engine

The folders are the ring, in order. A file is named after the noun it owns.

    core/      records        Task, Window, Trajectory, Verdict: what crosses
                              a process border, and its bytes
               config         `--set a.b=c` onto frozen dataclasses
               storage        gs://, a local folder or memory behind one door
               metrics        metrics.jsonl and TensorBoard event files
               dispatch       which group belongs to which step, and when
                              it may start
               safetensors_folder  Hugging Face folders, tensor by tensor
    parallel/  mesh           mesh axes from slices, hosts and chips
               sharding       one table: logical axes -> axes of the mesh
    tasks/     dataset        load, validate, split and fingerprint tasks
               sandbox        run commands without network, within limits
               sandbox_runner what runs inside the sandbox
               verifier       grade what an agent submitted: a Verdict
               micro_repair   the quickstart's tasks: one bug, one function
               micro_functions  the functions they are made from
    weights/   delta          the codec: diff, encode, verify, apply in place
               sections, coder  its entropy coding, with the parent as context
               staged         a decoded delta: merged, applied in place
               rebuild        versions back out of a store
               manifest       the chain of versions; a manifest is the commit
               publisher      trainer side: snapshot, diff, upload, commit
               controller     engine side: watch, fetch, stage, apply
    model/     config         Hugging Face field names; tiny presets
               attention      GQA and MLA, RoPE and YaRN
               moe            router, experts, replay of routed_experts
               transformer    blocks, embedding, head; init() and apply()
               hf             Hugging Face checkpoints in and out
    rl/        buffer         which groups may be trained on now
               batching       groups -> packed rows
               advantage      group baseline, broadcast to tokens
               sampling_mask  log-probabilities over the kept tokens
               loss           policy gradient and its diagnostics
    optim/     muon           Muon as an optax transformation
               optimizer      which parameter gets which rule; schedule
    train/     step           TrainState and the one jitted update
               loop           THE MAIN LOOP: take, pack, step, save, publish
               checkpoint     save and resume
               source         reads groups from the store as they finish
               cold_start     imitation, before any reward
               tree_store     nested arrays on disk, through orbax
    engine/    interface      what an engine is
               jax_engine     the embedded one: KV cache, continuous batching
               request        one prompt, and what an idle slot keeps
               programs       its compiled prefill and decode step
               sampler        top-k, top-p, and the mask sampled from
               fake_engine    a deterministic one for tests
    rollout/   chat           messages <-> token ids
               harness        the agent loop: prompt, tools, stop conditions
               demonstrations  a weak demonstrator's runs, for the cold start
               worker         take tasks, run groups, write records
    analysis/  report         report.html of a run
               curves, page   its plots and its HTML
               heldout        solve rates, intervals and examples
               summary        a run in a few numbers

Imports go down only; tests/layering_test.py holds the exact table.

    floor 4   analysis                           (nothing imports it)
    floor 3   train     engine     rollout       (train never meets rollout)
    floor 2   model     rl         optim
    floor 1   parallel  tasks      weights
    floor 0   core

`core`, `tasks`, `weights`, `rollout`, `analysis`, `engine/interface` and
`model/config` never reach JAX: hosts of engines and sandboxes start in a
second. `parallel`, `model`, `rl` and `optim` have no clock, network or files:
same inputs, same bits.

Where to start: `experiments/train_rl.py` calls `train/loop.py::run`, which
fits one screen. Then the record in `core/records.py`, then the folder you
came for; its `__init__.py` names the file to open first.
"""
