"""Every setting as a frozen dataclass, validated when it is built. No torch.

`schema.py` has `Config` and its parts; `compose.py` makes one from conf/*.yaml and overrides,
`flat.py` says how two differ and what each run is called.

**setting**: a field of one of these dataclasses, where its default stands once. **group**: a folder
of conf/ whose files hold what differs. **experiment**: a whole run. **study**: arms × seeds.
**factor**: a setting whose levels make a study's arms.
"""
