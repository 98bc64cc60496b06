"""Commands on checkpoint files during Ctrl-C, fork and exit."""

from .results import ENDS, Cells

SAVED = """
state = {'a': torch.arange(24 << 20, dtype=torch.float32)}
deepnvme.save(state, "file.safetensors", durability="none", engine=deepnvme.Engine())
before = set(os.listdir())
def works():
    "Whether a private file or folder has appeared."
    return set(os.listdir()) > before
paths = ["file.safetensors"] * 40
"""
# Its index takes a while to read.
MANY = """
entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
header = json.dumps({f"tensor-{i}": entry for i in range(100_000)}).encode()
with open("many.safetensors", "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
def inspect():
    assert len(deepnvme.inspect("many.safetensors")["files"][0]["tensors"]) == 100_000
"""
# The list of checkpoints takes a while to read, and a while to look for all that is missing.
LARGE_RUN = """
with deepnvme.Checkpointer("run") as checkpointer:
    checkpointer.save(1, {"a": torch.zeros(10)})
with open("run/manifest.json") as file:
    (entry,) = json.load(file)["checkpoints"]
entry.pop("pending", None)
entries = ",".join(json.dumps({**entry, "step": step, "file": f"step-{step:08}.pt"}) for step in range(200_000))
with open("run/manifest.json", "w") as file:
    file.write('{"version": 2, "checkpoints": [' + entries + ']}')
"""
SMALL = """
state = {'a': torch.arange(1 << 20, dtype=torch.float32)}
deepnvme.save(state, "file.safetensors", durability="none", engine=deepnvme.Engine())
deepnvme.verify("file.safetensors")
"""

VERIFY, INSPECT, CONVERT, PACK = "`verify`", "`inspect`", "`convert`", "`pack`"
REPORT, MEASURE = "`report`", "`bench`, `tune`"
ROWS = (VERIFY, INSPECT, CONVERT, PACK, REPORT, MEASURE)

NOTHING_LEFT = "\nassert set(os.listdir()) == before, set(os.listdir()) - before\n"
# An interrupted search keeps what it has found.
SETTINGS_LEFT = "\nassert set(os.listdir()) - before <= {'deepnvme.toml'}, set(os.listdir()) - before\n"
MEASURES = (
    "deepnvme.bench('write', '.', size='64M', loops=1000)",
    "deepnvme.bench('read', '.', size='64M', loops=1000)",
    "deepnvme.tune('.', budget=60, size='64M')",
)
MEASURES_LITTLE = (
    "deepnvme.bench('write', '.', size='1M', loops=1, warm_up=0)",
    "deepnvme.tune('.', budget=1, size='1M')",
)

CELLS: Cells = {
    (VERIFY, "Ctrl-C"): (
        "raises",
        SAVED + "ends_at_interrupt(lambda: deepnvme.verify(*paths), at(0.1))",
        *(LARGE_RUN + f"ends_at_interrupt(lambda: deepnvme.verify('run'), at({moment}))" for moment in (0.1, 1.0)),
    ),
    (VERIFY, "fork"): (
        "verifies, with an engine of its own",
        SMALL + "in_child(lambda: deepnvme.verify('file.safetensors'))",
    ),
    (VERIFY, "exit"): (ENDS, SAVED + "leave(lambda: deepnvme.verify(*paths), at(0.1))"),
    (INSPECT, "Ctrl-C"): ("raises", MANY + "ends_at_interrupt(inspect, at(0.02))"),
    (INSPECT, "fork"): ("lists, with an engine of its own", MANY + "in_child(inspect)"),
    (INSPECT, "exit"): (ENDS, MANY + "leave(inspect, at(0.02))"),
    (CONVERT, "Ctrl-C"): (
        "raises; no file appears",
        SAVED
        + """
ends_at_interrupt(lambda: deepnvme.convert("file.safetensors", "new.pt"), works)
assert set(os.listdir()) == before, os.listdir()
""",
    ),
    (CONVERT, "fork"): (
        "converts, with an engine of its own",
        SMALL
        + """
in_child(lambda: deepnvme.convert("file.safetensors", "new.pt"))
assert deepnvme.load("new.pt", verify="full")["a"].equal(state["a"])
""",
    ),
    (CONVERT, "exit"): (
        "the process ends; the file is whole or absent",
        SAVED + "leave(lambda: deepnvme.convert('file.safetensors', 'new.pt'), works)",
    ),
    (PACK, "Ctrl-C"): (
        "raises; no folder appears",
        SAVED
        + """
ends_at_interrupt(lambda: deepnvme.pack("file.safetensors", "new", dtype="int8"), works)
assert set(os.listdir()) == before, os.listdir()
""",
    ),
    (PACK, "fork"): (
        "packs, with an engine of its own",
        SMALL
        + """
in_child(lambda: deepnvme.pack("file.safetensors", "new", dtype="int8"))
assert deepnvme.verify("new")["is_sound"]
""",
    ),
    (PACK, "exit"): (
        "the process ends; the folder is whole or absent",
        SAVED + "leave(lambda: deepnvme.pack('file.safetensors', 'new', dtype='int8'), works)",
    ),
    (REPORT, "Ctrl-C"): (
        "raises; no file stays",
        "before = set(os.listdir())\n"
        "ends_at_interrupt(lambda: [deepnvme.report('.') for _ in range(200)], at(0.02))" + NOTHING_LEFT,
    ),
    (REPORT, "fork"): (
        "reports, with an engine of its own",
        "deepnvme.report('.')\nin_child(lambda: deepnvme.report('.'))",
    ),
    (REPORT, "exit"): (ENDS, "leave(lambda: [deepnvme.report('.') for _ in range(200)], at(0.02))"),
    (MEASURE, "Ctrl-C"): (
        "raises; no file stays, but `tune` keeps the best settings so far",
        *(
            f"before = set(os.listdir())\nends_at_interrupt(lambda: {call}, at(0.3))" + SETTINGS_LEFT
            for call in MEASURES
        ),
    ),
    (MEASURE, "fork"): (
        "measures, with an engine of its own",
        "deepnvme.default_engine()\n" + "".join(f"in_child(lambda: {call})\n" for call in MEASURES_LITTLE),
    ),
    (MEASURE, "exit"): (ENDS, *(f"leave(lambda: {call}, at(0.3))" for call in MEASURES)),
}
