"""The few classes of NVFlare that gradveil's filters use, for tests on machines without NVFlare."""

import importlib.util
import sys
from enum import StrEnum
from types import ModuleType, SimpleNamespace


class DataKind(StrEnum):
    WEIGHTS = "WEIGHTS"
    WEIGHT_DIFF = "WEIGHT_DIFF"
    METRICS = "METRICS"
    APP_DEFINED = "APP_DEFINED"


class Shareable(dict):
    def __init__(self):
        super().__init__({"__headers__": {}})

    def get_return_code(self, default="OK"):
        return self["__headers__"].get("__rc__", default)

    def get_header(self, key, default=None):
        return self["__headers__"].get(key, default)

    def set_header(self, key, value):
        self["__headers__"][key] = value


class DXO:
    def __init__(self, data_kind, data, meta=None):
        self.data_kind, self.data, self.meta = data_kind, data, meta or {}

    def get_meta_prop(self, key, default=None):
        return self.meta.get(key, default)

    def update_shareable(self, shareable):
        shareable["DXO"] = {"kind": self.data_kind, "data": self.data, "meta": self.meta}
        return shareable

    def to_shareable(self):
        return self.update_shareable(Shareable())


class DXOFilter:
    def __init__(self, supported_data_kinds, data_kinds_to_filter):
        self.data_kinds = data_kinds_to_filter or supported_data_kinds

    def set_prop(self, key, value):
        setattr(self, key, value)

    def get_prop(self, key, default=None):
        return getattr(self, key, default)

    def process(self, shareable, fl_ctx):
        dxo = from_shareable(shareable)
        if dxo.data and dxo.data_kind in self.data_kinds:
            return (self.process_dxo(dxo, shareable, fl_ctx) or dxo).update_shareable(shareable)
        return shareable


def from_shareable(shareable):
    held = shareable["DXO"]
    return DXO(held["kind"], held["data"], held["meta"])


def make_reply(code):
    reply = Shareable()
    reply["__headers__"]["__rc__"] = code
    return reply


MODULES = {
    "dxo": {
        "DXO": DXO, "DataKind": DataKind, "from_shareable": from_shareable,
        "MetaKey": SimpleNamespace(CURRENT_ROUND="current_round", NUM_STEPS_CURRENT_ROUND="NUM_STEPS_CURRENT_ROUND"),
    },
    "dxo_filter": {"DXOFilter": DXOFilter},
    "filter": {
        "FilterChainType": SimpleNamespace(TASK_DATA_CHAIN="task_data", TASK_RESULT_CHAIN="task_result"),
        "FilterContextKey": SimpleNamespace(CHAIN_TYPE="__chain_type"),
    },
    "fl_constant": {"ReturnCode": SimpleNamespace(OK="OK", EXECUTION_EXCEPTION="EXECUTION_EXCEPTION")},
    "fl_context": {"FLContext": object},
    "shareable": {"Shareable": Shareable, "make_reply": make_reply},
}  # fmt: skip


def use_if_missing():
    """Put the classes where the real ones would be, unless NVFlare is installed."""
    if "nvflare" not in sys.modules and importlib.util.find_spec("nvflare") is None:
        sys.modules["nvflare"] = ModuleType("nvflare")
        sys.modules["nvflare.apis"] = ModuleType("nvflare.apis")
        for name, values in MODULES.items():
            sys.modules[f"nvflare.apis.{name}"] = module = ModuleType(name)
            vars(module).update(values)
