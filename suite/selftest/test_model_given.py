"""Weights that an engine could not load are bad input, named before an engine is started."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.errors import UsageError
from fixtures.model_given import check_weights
from fixtures.models import ensure_model

pytestmark = pytest.mark.selftest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(ensure_model("tiny-base").path, tmp_path / "model")


def test_whole_weights_and_none_at_all_are_left_to_the_engine(model: Path) -> None:
    check_weights(model)
    (model / "model.safetensors").unlink()
    check_weights(model)


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "cut short, or no safetensors file"),
    "inside its header": (lambda whole: whole[:100], "cut short, or no safetensors file"),
    "inside its weights": (lambda whole: whole[:-1], "cut short: .* its header tells of"),
    "zeros": (lambda whole: bytes(len(whole)), "its header is no header"),
    "text": (lambda whole: b"<html>not found</html>", "no safetensors file"),
    "a pointer": (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_weights_that_are_not_whole_name_their_file(model: Path, what: str) -> None:
    change, message = BROKEN[what]
    path = model / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=rf"^model .*: model\.safetensors: .*{message}") as caught:
        check_weights(model)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_weights_is_one_line(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read: Is a directory"):
        check_weights(model)
