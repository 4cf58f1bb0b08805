"""While libraries of others build a model there is no hub, whatever was imported before; then all is as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from normwise.targets.offline import offline

constants = pytest.importorskip("huggingface_hub.constants")


def test_a_process_that_had_imported_the_hub_is_offline_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with offline():
        assert constants.is_offline_mode()
        assert os.environ["HF_HUB_OFFLINE"] == "1"  # of processes that are started
    assert not constants.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in os.environ


def test_what_the_user_had_set_is_there_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(RuntimeError), offline():
        raise RuntimeError
    assert not constants.is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_process_in_which_the_hub_is_imported_meanwhile_is_online_afterwards() -> None:
    code = (
        "import sys\nfrom normwise.targets.offline import offline\nassert 'huggingface_hub' not in sys.modules\n"
        "with offline():\n    from huggingface_hub import constants\n    assert constants.is_offline_mode()\n"
        "assert not constants.is_offline_mode()"
    )
    online = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    subprocess.run([sys.executable, "-c", code], env=online, check=True)
