"""The installation's settings: one ConfigMap `berth-settings` in `berth-system`, key `settings.yaml`, for everyone
who creates Jobs, places them, or asks registries. What it does not say has a default here; what it says wrongly is
refused with a path.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictStr

from crds.gpuworkload import EXTENDED_RESOURCE_PATTERN, STRATEGY_PATTERN, Argument, CRDModel, Int

SETTINGS_NAMESPACE = "berth-system"
SETTINGS_NAME = "berth-settings"
SETTINGS_KEY = "settings.yaml"

ParameterName = Annotated[StrictStr, Field(min_length=1, max_length=253)]
ParameterValue = Annotated[StrictStr, Field(max_length=255)]
Host = Annotated[StrictStr, Field(min_length=1, max_length=260, pattern=r"^\S+$")]
Mirror = Annotated[StrictStr, Field(min_length=1, max_length=512, pattern=r"^\S+$")]

_DEFAULT_SCRIPT = 'echo "berth: model ${MODEL_NAME} on ${GPU_COUNT} GPU(s); no image was given, so nothing more runs"'


class Provisioning(CRDModel):
    """How nodes are ordered from an autoscaler that understands ProvisioningRequests."""

    class_name: Annotated[
        StrictStr, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
    ]
    parameters: Annotated[dict[ParameterName, ParameterValue], Field(max_length=100)] = Field(default_factory=dict)
    max_orders: Annotated[Int, Field(ge=1, le=100)] = 10
    wait_seconds: Annotated[Int, Field(ge=0, le=86400)] = 30
    timeout_seconds: Annotated[Int, Field(ge=1, le=86400)] = 900
    booking_seconds: Annotated[Int, Field(ge=1, le=86400)] = 600
    retries: Annotated[Int, Field(ge=0, le=20)] = 3
    backoff_seconds: Annotated[Int, Field(ge=1, le=1800)] = 60


class Registries(CRDModel):
    """How registries of kernel caches are reached. Whether hosts and certificates make sense is for whoever connects
    (`images.endpoints.settings_of`), so that a mistake here stops kernel caches and nothing else.
    """

    mirrors: Annotated[dict[Host, Annotated[list[Mirror], Field(max_length=8)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    insecure: Annotated[list[Host], Field(max_length=64)] = Field(default_factory=list)
    authorities: Annotated[StrictStr, Field(max_length=256 * 1024)] = ""
    proxy: Annotated[StrictStr, Field(max_length=512)] = ""
    no_proxy: Annotated[StrictStr, Field(max_length=4096)] = ""


class Settings(CRDModel):
    """What the platform engineer sets once for the whole installation."""

    default_image: Annotated[StrictStr, Field(min_length=1, max_length=1024, pattern=r"^\S+$")] = "busybox:1.36"
    default_command: Annotated[list[Argument], Field(max_length=64)] = Field(default_factory=lambda: ["/bin/sh", "-c"])
    default_args: Annotated[list[Argument], Field(max_length=64)] = Field(default_factory=lambda: [_DEFAULT_SCRIPT])
    default_strategy: Annotated[StrictStr, Field(pattern=STRATEGY_PATTERN)] = "leastLoaded"
    gpu_resource: Annotated[
        StrictStr,
        Field(max_length=317, pattern=EXTENDED_RESOURCE_PATTERN),
    ] = "nvidia.com/gpu"
    minimum_runtime_seconds: Annotated[Int, Field(ge=0, le=86400)] = 60
    bind_deadline_seconds: Annotated[Int, Field(ge=1, le=3600)] = 30
    sample_seconds: Annotated[Int, Field(ge=1, le=3600)] = 15
    provisioning: Provisioning | None = None
    verify_enabled: StrictBool = True
    allow_unsigned_images: StrictBool = False
    registries: Registries = Field(default_factory=Registries)

    @classmethod
    def parse(cls, raw: object) -> tuple[Settings | None, str]:
        """The settings, or None and a sentence with path and reason; None or {} gives the defaults. Never raises."""
        if raw is None:
            return cls(), ""
        if not isinstance(raw, dict):
            return None, f"{SETTINGS_KEY}: must be a mapping"
        return cls.validated(raw, SETTINGS_KEY)
