"""An interrupt while the folder of a tier is read."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hf_paged.tiers.block_files import DiskFolder
from tests.test_interrupts import TimedOut, alarmed

pytestmark = pytest.mark.usefixtures("sigint")


def test_a_timeout_is_no_error_of_a_folder_of_prefixes(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 20)
    with alarmed() as ring:
        for call in (folder.has, functools.partial(folder.read, layers={})):
            tracing = sys.getprofile()
            entered = False

            def enter(frame: FrameType, event: str, argument: Any) -> None:
                nonlocal entered
                is_stat = frame.f_code.co_name in ("_is_regular", "_version")
                if event == "call" and is_stat and not entered:
                    entered = True
                    sys.setprofile(None)
                    ring()

            sys.setprofile(enter)
            try:
                with pytest.raises(TimedOut):
                    call("weights", "name")
            finally:
                sys.setprofile(tracing)
    assert not folder.is_off and not folder._unreadable
