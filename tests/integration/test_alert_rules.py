"""Prometheus' own word on the alert rules and on the queries of the dashboard: promtool, of Debian's `prometheus`."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.watching import ALERT_TESTS, ALERTS, panel_expressions

DEBIAN_PACKAGE = "prometheus"


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The installed one; else, as root on Debian, the one out of its package.

    The package is unpacked, not installed: installed, it would start a server on the worker's own port.
    """
    if found := shutil.which("promtool"):
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        room = tmp_path_factory.mktemp("promtool")
        if unpacked := _unpacked(room):
            return unpacked
    why = "promtool is needed: install it, or Debian's package prometheus (as root on Debian this test unpacks that)"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _unpacked(room: Path) -> str | None:
    download = ("apt-get", "-o", "APT::Sandbox::User=root", "download", DEBIAN_PACKAGE)
    for command in (download, ("apt-get", "update"), download):
        fetched = subprocess.run(command, cwd=room, check=False, timeout=100, capture_output=True)
        if fetched.returncode == 0 and (packages := list(room.glob("*.deb"))):
            subprocess.run(("dpkg-deb", "-x", packages[0], room / "out"), check=True, timeout=60)
            return str(room / "out" / "usr" / "bin" / "promtool")
    return None


def checked(*command: str | Path) -> str:
    ran = subprocess.run(command, check=False, timeout=60, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_prometheus_takes_the_rules(promtool: str) -> None:
    # --lint-fatal: an oddity, as a rule that is there twice, is a mistake too.
    assert "SUCCESS" in checked(promtool, "check", "rules", "--lint=all", "--lint-fatal", ALERTS)


def test_each_alert_fires_when_it_should_and_not_before(promtool: str) -> None:
    assert "SUCCESS" in checked(promtool, "test", "rules", ALERT_TESTS)


def test_prometheus_takes_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    """As recording rules, which is the one way in which promtool parses expressions that are not asked of a server."""
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression) in enumerate(panel_expressions())
    ]
    file = tmp_path / "dashboard.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML.

    assert f"{len(rules)} rules found" in checked(promtool, "check", "rules", file)
