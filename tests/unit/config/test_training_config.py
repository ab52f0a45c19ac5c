"""Training configs: file, --set, presets; every error with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.config.training import load_training
from gpuctl.core.training import PRESETS, TrainingConfig
from gpuctl.errors import ConfigError


def test_nothing_given_is_the_default() -> None:
    assert load_training() == TrainingConfig()


def test_settings_win_over_the_file_and_later_over_earlier() -> None:
    config = load_training(
        text="steps: 10\noptim: {lr: 1e-3}\n", settings=["steps=20", "optim.warmup_steps=1", "steps=30"]
    )
    assert (config.steps, config.optim.lr, config.optim.warmup_steps) == (30, 1e-3, 1)


def test_a_preset_fills_the_model_and_a_changed_one_loses_its_name() -> None:
    assert load_training(settings=["preset=tiny"]).model == PRESETS["tiny"]
    config = load_training(settings=["preset=tiny", "model.dim=64"])
    assert (config.preset, config.model.dim, config.model.num_layers) == (
        None,
        64,
        PRESETS["tiny"].num_layers,
    )


def test_text_stays_text_and_null_is_nothing() -> None:
    config = load_training(settings=["tags.run=no", "tags.n=1", "optim.clip_norm=null", "compile=true"])
    assert config.tags == {"run": "no", "n": "1"}
    assert config.optim.clip_norm is None
    assert config.compile is True


@pytest.mark.parametrize(
    ("text", "settings", "message", "hint"),
    [
        ("stpes: 1\n", [], "f.yaml:1: unknown key 'stpes'", "did you mean 'steps'?"),
        ("steps: 1\noptim:\n  lrr: 1\n", [], "f.yaml:3: unknown key 'lrr'", "did you mean 'lr'?"),
        (
            "optim:\n  lr: no\n",
            [],
            "f.yaml:2: optim.lr: input should be a valid number",
            "for example optim.lr=0.0003",
        ),
        ("steps: 0\n", [], "f.yaml:1: steps: 0 is not a count", "for example steps=50"),
        ("preset: tinny\n", [], "f.yaml:1: there is no model 'tinny'", "did you mean 'tiny'?"),
        ("- a\n", [], "f.yaml: not a training config", "write keys: `steps: 100`"),
        ("", ["steps"], "--set steps: not key=value", "write --set optim.lr=1e-3"),
        ("", ["stepz=1"], "--set stepz=1: unknown key 'stepz'", "did you mean 'steps'?"),
        ("", ["steps=no"], "--set steps=no: steps: input should be a valid integer", "for example steps=50"),
        ("", ["model.dim.x=1"], "--set model.dim.x=1: 'dim' has no keys below it", "write --set model.dim=1"),
        ("", ["optim=3"], "--set optim=3: optim: input should be an object", None),
    ],
)
def test_errors_name_their_place(text: str, settings: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training(Path("f.yaml"), text=text, settings=settings)
    assert (caught.value.message, caught.value.hint) == (message, hint)
