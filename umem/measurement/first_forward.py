"""One way from the start of a process to the first forward pass of a model; run as `-m` in a process of its own.

Prints what it took as one line of JSON: seconds by phase, spans on the clock that the parent started, digests, and what
`meter` counts from the load's beginning to the end of the first forward pass.
"""

from __future__ import annotations

import time

_ENTERED_S = time.monotonic()  # before anything else is imported

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from umem.measurement.baselines import MODEL_LOADERS, Loaded, LoadRequest, Span  # noqa: E402
from umem.measurement.digest import digest, tensors_of  # noqa: E402
from umem.measurement.meter import measured, request_of_child  # noqa: E402

if TYPE_CHECKING:
    import torch

    from umem.report.model import LoadReport

__all__ = ["PROGRAM", "flattened", "main"]

PROGRAM = ("-m", "umem.measurement.first_forward")
_TOKENS = 16


def main() -> None:
    """Do what the parent asks for."""
    request = request_of_child()
    if request is None:
        sys.exit("this is run by umem ttff")
    try:
        facts = _facts(request)
    except Exception as error:  # noqa: BLE001 - the parent gets its one line, whatever it is
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    sys.stdout.write(json.dumps(facts) + "\n")


def _facts(request: Mapping[str, Any]) -> dict[str, Any]:
    loader = MODEL_LOADERS[request["loader"]]
    wanted = LoadRequest(Path(request["checkpoint"]), request["device"], request["dtype"], request["settings"])
    loader.prepare(wanted)
    imported_s = time.monotonic()
    if request["only_imports"]:
        return _place(wanted.device)
    return _measured_way(loader.load, wanted, request, imported_s)


def _place(device: str) -> dict[str, Any]:
    """Where a load goes here: the platform, and what torch computes with."""
    import torch

    from umem.probes import probe_platform

    platform = probe_platform(device)
    kind = platform.device.partition(":")[0]
    built = torch.version.hip or torch.version.cuda if kind == "cuda" else None
    name = "rocm" if kind == "cuda" and torch.version.hip else kind
    return {"platform": platform.to_json(), "backend": f"{name} {built}" if built else name}


def _measured_way(load: Any, wanted: LoadRequest, request: Mapping[str, Any], imported_s: float) -> dict[str, Any]:
    import torch

    started_s = request["started_s"]
    passes: list[Span] = []

    def forward(model: Any, name: str) -> torch.Tensor:
        begun_s = time.monotonic()
        with torch.no_grad():
            logits = _logits(model, wanted.device)
        passes.append((name, begun_s, time.monotonic()))
        return logits

    def way() -> tuple[Loaded, torch.Tensor]:
        loaded = load(wanted)
        return loaded, forward(loaded.model, "first forward")

    (loaded, logits), facts = measured(way, request, collects_first=False)
    forward(loaded.model, "second forward")
    spans = [("start", started_s, _ENTERED_S), ("import", _ENTERED_S, imported_s), *flattened(loaded.spans), *passes]
    seconds: dict[str, float] = {}
    for name, start_s, end_s in spans:
        seconds[name] = seconds.get(name, 0.0) + end_s - start_s
    facts |= {
        "load_s": max(end for _, _, end in loaded.spans) - min(start for _, start, _ in loaded.spans),
        "first_forward_s": passes[0][2] - started_s,
        "phases_s": seconds,
        "spans": [[name, start_s - started_s, end_s - started_s] for name, start_s, end_s in spans],
        "dtype": str(next(iter(loaded.model.parameters())).dtype).removeprefix("torch."),
        "model_class": type(loaded.model).__name__,
        "logits_digest": digest([("logits", logits)]),
        "device_peak_bytes": torch.cuda.max_memory_reserved() if wanted.device.startswith("cuda") else None,
    }
    if request["digest_weights"]:
        facts["weights_digest"] = digest([*tensors_of(loaded.model).items(), *loaded.model.named_buffers()])
    if loaded.report is not None:
        facts["report"] = _for_records(loaded.report)
    return facts


def _for_records(report: LoadReport) -> dict[str, Any]:
    """The report as JSON values, without its series, and without where on this machine the checkpoint is."""
    told = {name: part for name, part in report.to_json().items() if name != "series"}
    checkpoint = told["plan"]["checkpoint"]
    checkpoint["path"] = Path(checkpoint["path"]).name
    return told


def _logits(model: Any, device: str) -> torch.Tensor:
    """The model's answer to some tokens, which is there when this returns."""
    import torch

    tokens = torch.arange(1, _TOKENS + 1, device=device)[None]
    inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    output = model(input_ids=tokens, **inputs)
    found = output.logits if "logits" in output else output[0]
    logits: torch.Tensor = found.cpu()
    return logits


def flattened(spans: Sequence[Span]) -> list[Span]:
    """Spans that may nest as spans that follow each other: at any time the innermost counts; gaps are `between`."""
    bounds = sorted({bound for _, start, end in spans for bound in (start, end)})
    flat: list[Span] = []
    for start_s, end_s in zip(bounds, bounds[1:], strict=False):
        around = [span for span in spans if span[1] <= start_s and end_s <= span[2]]
        name = min(around, key=lambda span: span[2] - span[1])[0] if around else "between"
        if flat and flat[-1][0] == name:
            start_s = flat.pop()[1]  # noqa: PLW2901 - the span goes on
        flat.append((name, start_s, end_s))
    return flat


if __name__ == "__main__":
    main()
