"""Reads the installation's settings from the ConfigMap that holds them, and says what is wrong with it.

For all who obey them: the control plane's cache, admission, nodes and the command line.
"""

from __future__ import annotations

import yaml

from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from planning.podspecs import mapping, text


def read_settings(data: object) -> tuple[Settings | None, str]:
    """The settings that the ConfigMap's `data` holds, or None and a sentence; without any, the defaults. Never raises,
    whatever somebody wrote there.
    """
    try:
        settings, wrong = Settings.parse(yaml.safe_load(text(mapping(data).get(SETTINGS_KEY))))
    # A value that looks like a date and is none is a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        settings, wrong = None, f"{SETTINGS_KEY} is not YAML: {told}"
    return settings, settings_refused(wrong) if settings is None else ""


def settings_refused(wrong: object) -> str:
    """What is said where the settings cannot be used."""
    return f"ConfigMap {SETTINGS_NAMESPACE}/{SETTINGS_NAME} cannot be used: {wrong}"
