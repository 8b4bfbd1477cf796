"""Surgery: more heads, fewer layers, other MLPs, and the proof of what was kept.

    the plan       `requested_shape` and `method` (what a user asks for), `planning` (from shape to operators; reads no
                   weights), `operators`, `drop_layers`, `class_attention`, `costs`, `next_steps`
    a cut          `shrink` (the whole of it), `transfer` (tensors to the output by index maps), `undo` (the maps read
                   backwards), `prune` (heads by measured importance)
    calibration    `calibrate` (the whole of it), `context`, `candidates`, `candidate_model`, `choose_layers`, `score`,
                   `spans`, `budget`, `forecast`, `resume`
    one layer      `canonical` (one form for every layout), `split_heads`, `split_factors`, `trim_units`, `balance`;
                   `ridge`, `refit_block` and `local_fit` repair it, `probes` holds the handles
    checks         `doctor` and `roles` test a family's declaration, `family_check`, `undeclared` and `undeclared_timm`
                   every type of a library; `judged` compares a result with its source on other data

Importing the plan costs no torch.
"""
