"""Values that no setting can mean are refused by name, wherever they stand in a file."""

from pathlib import Path

import pytest

from fixtures.errors import UsageError
from fixtures.spec import load_spec, parse_spec
from fixtures.spec_external import is_root_url

pytestmark = pytest.mark.selftest

NATIVE = '[engine]\nconnector = "native"\n'

BAD = {
    "a budget that nothing exceeds": (f'name = "x"\n{NATIVE}[budget]\nttft_factor = nan', "budget.ttft_factor = nan"),
    "a wait without end": (f'name = "x"\n{NATIVE}[timeouts]\nrequest_s = inf', "timeouts.request_s = inf"),
    "deep inside": (f'name = "x"\n{NATIVE}kv_extra = {{a = [{{b = -inf}}]}}', r"engine.kv_extra.a\[0\].b = -inf"),
    "no 64-bit number": (f'name = "x"\n{NATIVE}kv_cache_bytes = 99999999999999999999', "kv_cache_bytes: .* 64 bits"),
    "no number at all": (f'name = "x"\nengine_count = {"9" * 5000}', "not valid TOML"),
    "an argument with NUL": (f'name = "x"\n{NATIVE}args = ["\\u0000"]', r"engine.args\[0\]: holds a NUL"),
    "a date": (f'name = "x"\n{NATIVE}kv_extra = {{a = 1979-05-27}}', "put quotes around"),
    "lists without end": (f'name = "x"\nx = {"[" * 5000}{"]" * 5000}', "nested deeper"),
    "tables without end": (f'name = "x"\n{NATIVE}[engine.kv_extra]\n{".".join("a" * 100)} = 1', "nested deeper"),
    "engines without end": ('name = "x"\nengine_count = 99999999999', "1 to 256 engines"),
    "a name that leaves the folder": (f'name = "../x"\n{NATIVE}', "name = '../x': 1 to 64"),
    "an empty name": (f'name = ""\n{NATIVE}', "1 to 64"),
    "an engine called like the master": (f'name = "x"\n{NATIVE}[[engines]]\nname = "master"', "another unit"),
    "an engine of other letters": (f'name = "x"\n{NATIVE}[[engines]]\nname = "é"', "no usable name"),
    "a ratio above 1": ('name = "x"\n[store]\neviction_ratio = 7', "eviction_ratio = 7"),
    "a seed that Python refuses": (f'name = "x"\n{NATIVE}hash_seed = "4294967296"', "up to 4294967295"),
    "digits that are none": (f'name = "x"\n{NATIVE}hash_seed = "²"', "hash_seed"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_no_setting_can_mean_is_one_clear_error(what: str) -> None:
    text, message = BAD[what]
    with pytest.raises(UsageError, match=message) as caught:
        parse_spec(text, "bad.toml")
    assert str(caught.value).startswith("bad.toml: ")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + f'name = "x"\r\n{NATIVE}'.encode())
    assert load_spec(path).name == "x"


@pytest.mark.parametrize("name", ["x" * 5000, "y" * 300 + ".toml"])
def test_a_path_that_cannot_be_looked_at_is_one_clear_error(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--stack .*cannot be looked at"):
        load_spec(name)


@pytest.mark.parametrize(
    "url",
    ["http://[h", "http://h:99999", "http://h:x", "http://h:0", "http://h:1?q", "http://h:1#f", "http://u:p@h:1",
     "http://h:1/v1", "http://h\n:1", "http://h h:1", "ftp://h:1", "h:1", ""],
)  # fmt: skip
def test_only_root_urls_are_taken(url: str) -> None:
    assert not is_root_url(url)


@pytest.mark.parametrize("url", ["http://h:1", "https://h", "http://10.0.0.1:8000/", "http://[::1]:8000"])
def test_root_urls_are_taken(url: str) -> None:
    assert is_root_url(url)


def external(engines: str, more: str = "") -> str:
    names = "".join(f'[[engines]]\nname = "{name}"\n' for name in ("e0", "e1"))
    return f'name = "x"\nruntime = "external"\n{NATIVE}{names}[external]\nengines = {{ {engines} }}\n{more}'


def test_two_engines_at_one_url_are_refused() -> None:
    """An engine always has its own blocks: nothing that is judged between two would mean anything."""
    with pytest.raises(UsageError, match="'e0' and 'e1' have one URL"):
        parse_spec(external('e0 = "http://h:1", e1 = "http://h:1/"'), "x.toml")


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="no root URL") as caught:
        parse_spec(external('e0 = "http://me:hunter2@h:1", e1 = "http://h:2"'), "x.toml")
    assert "hunter2" not in str(caught.value)


def test_the_address_of_the_master_needs_a_port() -> None:
    with pytest.raises(UsageError, match="master_rpc = 'h' is no host:port"):
        parse_spec(external('e0 = "http://h:1", e1 = "http://h:2"', 'master_rpc = "h"'), "x.toml")
