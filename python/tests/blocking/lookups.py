"""Look-ups of rows in a streamed model, and commands on tables, during close, Ctrl-C, fork and exit."""

from .results import CLOSED, ENDS, Cells

# A table of zeros whose rows are read one by one, in memory for a few of them.
TABLE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1 << 17, 1024)
    def forward(self, ids):
        return self.table(ids)
header = {"table.weight": {"dtype": "F32", "shape": [1 << 17, 1024], "data_offsets": [0, 1 << 29]}}
header = json.dumps(header).encode()
header += b" " * (4088 - len(header))
with open("model.safetensors", "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(4096 + (1 << 29))
with torch.device("meta"):
    model = Model().eval()
model = deepnvme.stream(model, weights="model.safetensors", memory=4 << 20)
def look_up(rows=1 << 16):
    with torch.no_grad():
        return model(torch.arange(0, 2 * rows, 2))
def moves():
    return model.streaming.stats().row_waits > 20
"""
CHECKPOINT = """
deepnvme.default_engine()
entry = {"dtype": "U8", "shape": [1 << 18, 4096], "data_offsets": [0, 1 << 30]}
# Their list takes a while.
others = {f"tensor-{i}": {"dtype": "F32", "shape": [0, 1], "data_offsets": [0, 0]} for i in range(50_000)}
header = json.dumps({"table": entry, **others}).encode()
with open("file.safetensors", "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + (1 << 30))
before = set(os.listdir())
def end(command, *arguments):
    "Give the arguments of a command, in a process that can only have one."
    from deepnvme.__main__ import main
    sys.argv = ["deepnvme", "rows", command, "file.safetensors", *arguments]
    assert returns(main) == 1
    assert set(os.listdir()) == before
"""

LOOK_UP, COMMAND = "a streamed model's look-up of rows", "`deepnvme rows inspect`, `pack`, `bench`"
ROWS = (LOOK_UP, COMMAND)

ENDED = "the command ends with status 1; no file appears"
COMMANDS = (
    ("at(0.1)", "'inspect'"),
    ("busy(1 << 20)", "'pack', 'new', '--tensor', 'table'"),
    ("busy(1 << 20)", "'bench', '--tensor', 'table', '--memory', '1MB', '--rounds', '1000', '--against', 'mmap'"),
)

CELLS: Cells = {
    (LOOK_UP, "close"): (
        CLOSED,
        TABLE + "soon(model.streaming.close, moves)\nraises(errors.ClosedError, look_up)",
    ),
    (LOOK_UP, "Ctrl-C"): (
        "raises; the model can be used further",
        TABLE
        + """
ends_at_interrupt(look_up, moves)
assert look_up(3).eq(0).all()
model.streaming.close()
""",
    ),
    (LOOK_UP, "fork"): (
        CLOSED,
        TABLE + "in_child(lambda: raises(errors.ClosedError, lambda: look_up(3)))\nassert look_up(3).eq(0).all()",
    ),
    (LOOK_UP, "exit"): (ENDS, TABLE + "leave(look_up, moves)"),
    (COMMAND, "Ctrl-C"): (
        ENDED,
        *(CHECKPOINT + f"soon(interrupt, {moment})\nend({arguments})" for moment, arguments in COMMANDS),
        # So does the end of a service.
        CHECKPOINT + "soon(lambda: os.kill(os.getpid(), signal.SIGTERM), busy(1 << 20))\n" + f"end({COMMANDS[1][1]})",
    ),
}
