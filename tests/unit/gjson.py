"""KEDA's reading of an answer, as its `metrics-api` trigger reads JSON: a GJSON path, and a value that is a number.

After tidwall/gjson and KEDA's pkg/scalers/metrics_api_scaler.go: a JSON number is used as it is, and what is none is an
error, which counts as a failed look; after enough of them the fallback acts. (KEDA would take a string that is a
Kubernetes quantity, too; here that is an error: what is documented as a number is one.)
"""

import json
import re


class Unreadable(Exception):
    """KEDA counts a failure, and after enough of them its fallback acts."""


def path_parts(path: str) -> list[str]:
    """A path's keys: dots part them, unless escaped."""
    return [re.sub(r"\\(.)", r"\1", part) for part in re.findall(r"(?:\\.|[^.\\])+", path)]


def value_at(document: bytes, path: str) -> object:
    """What lies at a path; `...` where nothing does."""
    found = json.loads(document)
    for part in path_parts(path):
        if not isinstance(found, dict) or part not in found:
            return ...
        found = found[part]
    return found


def read(status: int, document: bytes, path: str) -> float:
    """The number that KEDA scales by."""
    if status != 200:
        raise Unreadable(f"status {status}")
    value = value_at(document, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable(f"valueLocation {path} must point to a number, and there is {value!r}")
    return float(value)
