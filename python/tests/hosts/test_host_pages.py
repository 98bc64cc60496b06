"""Run the examples of the documentation that need a training library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "frameworks.md"
BEFORE = {
    "lightning": """
import torch
from lightning.pytorch import LightningModule
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, _):
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
module, batches = Module(), torch.utils.data.DataLoader(torch.randn(4, 4))
""",
    "transformers": """
import transformers
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
""",
}


@pytest.mark.parametrize("host", BEFORE)
def test_example(host: str, tmp_path: Path) -> None:
    pytest.importorskip(host, reason=f"{host} is not installed: make test-hosts")
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = (text for text in examples if f"integrations.{host}" in text)
    command = [sys.executable, "-c", BEFORE[host] + example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(tmp_path.rglob("*.ckpt" if host == "lightning" else "*.safetensors"))
