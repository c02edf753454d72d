"""Settings: what overrides what, and what is said about those that cannot be used."""

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from layout_tuner import config
from layout_tuner.config import Config
from layout_tuner.errors import REFUSAL, ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory: no settings are found in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(text: str, folder: Path) -> str:
    """What is said about a settings file."""
    file = folder / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    return str(caught.value)


def test_the_commented_file_holds_every_default() -> None:
    written = tomllib.loads((ROOT / "tuner.toml").read_text())
    defaults = Config().model_dump(mode="json")
    assert written == defaults
    assert [(section, list(settings)) for section, settings in written.items()] == [
        (section, list(settings)) for section, settings in defaults.items()
    ]


def test_every_setting_of_the_file_is_commented() -> None:
    block: list[str] = []
    uncommented = []
    commented = False
    for line in (ROOT / "tuner.toml").read_text().splitlines():
        if line.startswith("#"):
            commented = True
        elif "=" in line:
            block.append(line)
            if not commented:
                uncommented.append(line)
        else:
            commented = False
    assert block
    assert not uncommented


def test_file_found_in_the_working_directory(folder: Path) -> None:
    assert Config.load() == Config()
    (folder / "tuner.toml").write_text("[tuning]\nmin_gain = 0.25\n")
    assert Config.load().tuning.min_gain == 0.25


def test_explicit_over_environment_over_file_over_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "mine.toml"
    file.write_text('[tuning]\nmin_gain = 0.1\nbudget_s = 10\non_miss = "error"\n')
    monkeypatch.setenv("LAYOUT_TUNER_TUNING_MIN_GAIN", "0.2")
    monkeypatch.setenv("LAYOUT_TUNER_TUNING_BUDGET_S", "20")
    tuning = Config.load(file, tuning={"min_gain": 0.3}).tuning
    assert (tuning.min_gain, tuning.budget_s, tuning.on_miss) == (0.3, 20.0, "error")
    assert Config.load(file).tuning.min_gain == 0.2
    assert Config.load(file).measure == Config().measure


def test_file_named_by_variable_and_by_argument(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tuner.toml").write_text("[keys]\nmax_keys = 1\n")
    (folder / "two.toml").write_text("[keys]\nmax_keys = 2\n")
    (folder / "three.toml").write_text("[keys]\nmax_keys = 3\n")
    monkeypatch.setenv("LAYOUT_TUNER_CONFIG", str(folder / "two.toml"))
    assert Config.load().keys.max_keys == 2
    assert Config.load(folder / "three.toml").keys.max_keys == 3


def test_a_relative_variable_names_the_same_file_after_a_change_of_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "relative.toml").write_text("[keys]\nmax_keys = 4\n")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "relative.toml").write_text("[keys]\nmax_keys = 5\n")
    config.taken.cache_clear()
    monkeypatch.setenv("LAYOUT_TUNER_CONFIG", "relative.toml")
    assert Config.load().keys.max_keys == 4
    monkeypatch.chdir(folder / "elsewhere")
    assert Config.load().keys.max_keys == 4
    config.taken.cache_clear()
    monkeypatch.setenv("LAYOUT_TUNER_CONFIG", "https://user:secret@host/tuner.toml")
    with pytest.raises(ConfigError, match=r"LAYOUT_TUNER_CONFIG: a file is wanted.*\*\*\*@host"):
        Config.load()


def test_unknown_names_list_the_known_ones(folder: Path) -> None:
    message = refusal("[tuning]\nmin_gian = 1\n\n[tunning]\nx = 1\n", folder)
    assert "bad.toml" in message
    assert "[tuning] min_gian: unknown (known: on_miss, min_gain, budget_s" in message
    assert "[tunning]: unknown (known: [tuning], [measure], [keys], [cache]" in message


def test_unknown_variable_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_TUNNING_BUDGET", "3")
    with pytest.raises(
        ConfigError, match=r"LAYOUT_TUNER_TUNNING_BUDGET: unknown variable .*LAYOUT_TUNER_TUNING_BUDGET_S"
    ):
        Config.load()


def test_every_bad_value_is_named_at_once(folder: Path) -> None:
    message = refusal(
        '[tuning]\nmin_gain = -1\non_miss = "ask"\n[keys]\nmax_keys = "many"\n[measure]\nl2 = 3\n', folder
    )
    for part in ("[tuning] min_gain", "-1", "[tuning] on_miss", "'ask'", "[keys] max_keys", "'many'", "[measure] l2"):
        assert part in message


def test_bad_value_of_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_TUNING_MIN_GAIN", "lots")
    with pytest.raises(ConfigError, match=r"LAYOUT_TUNER_TUNING_MIN_GAIN: .*'lots'"):
        Config.load()


def test_setting_outside_a_section_is_named(folder: Path) -> None:
    assert "min_gain: wanted a section [min_gain], got 0.1" in refusal("min_gain = 0.1\n", folder)


@pytest.mark.parametrize("name", ["num_warps", "num_stages"])
@pytest.mark.parametrize("text", ["{} = 4\n", "[tuning]\n{} = 4\n", "[{}]\nx = 4\n", "[tuning.{}]\nx = 4\n"])
def test_launch_settings_are_refused_in_a_file(folder: Path, name: str, text: str) -> None:
    message = refusal(text.format(name), folder)
    assert f"{name}: {REFUSAL}" in message
    assert "unknown" not in message


@pytest.mark.parametrize("name", ["LAYOUT_TUNER_NUM_WARPS", "LAYOUT_TUNER_TUNING_NUM_STAGES"])
def test_launch_settings_are_refused_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError) as caught:
        Config.load()
    assert f"{name}: {REFUSAL}" in str(caught.value)


@pytest.mark.parametrize("name", ["num_warps", "num_stages"])
def test_launch_settings_are_refused_as_arguments(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(tuning={name: 4})
    assert REFUSAL in str(caught.value)
    with pytest.raises(ValidationError):
        Config(tuning={name: 4})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda file: None, "No such file"),
        (lambda file: file.write_text("[tuning"), "not TOML"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "not TOML"),
        (lambda file: file.mkdir(), "directory"),
    ],
)
def test_unreadable_file(folder: Path, make, said: str) -> None:
    file = folder / "settings.toml"
    make(file)
    with pytest.raises(ConfigError, match=said) as caught:
        Config.load(file)
    assert "settings.toml" in str(caught.value)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().tuning.min_gain = 0.5
