"""All that must hold on a GPU, and how fast it is: `python -m engine.gpu_check`. A table, and a JSON file.

Kernels against their references, greedy tokens of random models against transformers, then decode and prefill rates
beside the bandwidth that was measured in the same run. Needs torch, triton, transformers, numpy and pydantic. Without a
GPU it does the same with tiny shapes in Triton's interpreter (TRITON_INTERPRET=1), where the rates mean nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.gpu_models import MODELS, differing, write_config
from engine.gpu_rates import Rates, bandwidth, measure
from kernels.check import LARGE, SMALL, as_json, check_all


def kernels(device: torch.device, report: dict[str, Any]) -> Iterator[str]:
    report["kernels"] = []
    for kind, finding in check_all(SMALL if device.type == "cpu" else LARGE, device):
        report["kernels"].append(as_json(kind, finding))
        verdict = "good" if finding.good else "WRONG"
        yield f"{finding.name:44}{kind:>10}{finding.error:12.2e}{finding.allowed:12.0e}  {verdict}"
        report["good"] = report["good"] and finding.good


def tokens(device: torch.device, folder: Path, report: dict[str, Any]) -> Iterator[str]:
    report["tokens"] = []
    for shape in MODELS[device.type]:
        wrong, ties, compared = differing(shape, write_config(shape, folder), device)
        report["tokens"].append({"model": shape.name, "compared": compared, "wrong": wrong, "near_ties": ties})
        verdict = "good" if not wrong else "WRONG"
        yield f"{shape.name:44}{shape.dtype:>10}{compared:8} tokens, {ties} requests with a near-tie  {verdict}"
        report["good"] = report["good"] and not wrong


def rates(device: torch.device, folder: Path, report: dict[str, Any]) -> Iterator[str]:
    shape = MODELS[device.type][-1]
    report["bandwidth"] = bytes_per_s = bandwidth(device)
    report["rates"] = []
    yield f"memory: {bytes_per_s / 1e9:.0f} GB/s read and written; model: {shape.name}, {shape.dtype}"
    yield f"{'':26}{'batch':>6}{'decode/s':>10}{'ms/step':>9}{'roofline':>10}{'host':>7}{'prefill/s':>11}"
    for rate in measure(shape, write_config(shape, folder), device, bytes_per_s):
        report["rates"].append(rate._asdict())
        yield row(rate)


def row(rate: Rates) -> str:
    return (
        f"{rate.variant:26}{rate.batch:6}{rate.decode_tokens_per_s:10.0f}{rate.step_ms:9.2f}"
        f"{rate.roofline:10.0%}{rate.host_share:7.0%}{rate.prefill_tokens_per_s:11.0f}"
    )


def main() -> int:
    """1 if a kernel or a token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the results go")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: Triton's interpreter, tiny shapes"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "good": True}
    print(f"{name}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for title, part in (
            ("Kernels against their references: largest error, and what is allowed", kernels(device, report)),
            ("Greedy tokens against transformers", tokens(device, Path(folder), report)),
            ("Rates", rates(device, Path(folder), report)),
        ):
            print(f"\n{title}", flush=True)
            for line in part:
                print(line, flush=True)
    options.json.write_text(json.dumps(report, indent=1))
    print(f"\n{'All good' if report['good'] else 'SOMETHING IS WRONG'}; results are in {options.json}")
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
