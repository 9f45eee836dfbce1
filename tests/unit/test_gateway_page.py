"""The page: served with nothing from elsewhere, and drawn by a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_house import House, ask, gateway
from gateway_status import document

from spark_gateway.app import PAGE

Start = Callable[..., Any]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(status=document())) as made:
        yield made


def test_the_page_and_its_parts_are_served_and_name_nothing_from_elsewhere(house: House) -> None:
    status, headers, page = ask(house, "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    parts = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    assert sorted(parts) == ["/page/page.css", "/page/page.js"]
    for text in (page, *(ask(house, part)[2] for part in parts)):
        assert not re.search(r"https?://|@import|url\(", text)
    assert {path.name for path in PAGE.iterdir()} == {"index.html", "page.css", "page.js"}
    assert ask(house, "/page/../app.py")[0] == 404


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_status(house: House, tmp_path: Path) -> None:
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"{house.url}/"]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert 'id="state" role="status" class="ready">ready<' in drawn
    assert "model, laguna, 100 positions" in drawn and 'data-cells="8"' in drawn
    assert "connected: model is ready" in drawn and "75.0 %" in drawn
    assert re.search(r"<td>worker</td><td>ready</td><td>2</td>", drawn)
