"""The precision that each role of a model is stored in: a data file keyed by role, and two options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ConfigError, OptionError, known_names
from ..spec import Quantisation, Tensor, read_json, user_path
from .format import BITS, GROUPS

STORED, DEFAULT = "stored", "int4"
CHOICES = {16: None, **{bits: Quantisation(bits, 64) for bits in (8, 4)}}
FOLDER = resources.files(__package__) / "policies"


@dataclass(frozen=True)
class Policy:
    """`roles` maps a role to a Quantisation, or to None for 'as stored'. Only what is not yet quantised is affected.

    `forced` holds the roles that an option set: they are repacked even when the source is quantised. `asked`: somebody
    named the policy, so that it holds too for what a quantised source left plain.
    """

    name: str
    roles: dict[str, Quantisation | None]
    forced: frozenset[str] = frozenset()
    asked: bool = True

    def target(self, tensor: Tensor) -> Quantisation | None:
        """The precision of a tensor that is found unquantised. Raises OptionError for a role the policy lacks."""
        role = policy_role(tensor)
        if role not in self.roles:
            raise OptionError(f"Policy {self.name!r} lacks role {role!r}; add it as 'stored' or as bits and group.")
        return self.roles[role]


def policy_role(tensor: Tensor) -> str:
    """The key of a tensor in a policy: its role, with 'mtp.' before it in the MTP layer."""
    return "mtp." + tensor.role if tensor.name.startswith("mtp.layers.") else tensor.role


def policies() -> list[str]:
    """Names of the bundled policies."""
    return sorted(entry.name.removesuffix(".json") for entry in FOLDER.iterdir() if entry.name.endswith(".json"))


def _bundled(name: str) -> Path:
    return Path(str(FOLDER / f"{name}.json"))


def known_roles() -> list[str]:
    """Every role that a model can have, MTP layer included: each bundled policy names them all."""
    return list(read_json(_bundled("int4"))["roles"])


def _check_roles(roles: dict[str, Any], path: Path) -> None:
    known = known_roles()
    for role in roles:
        if role not in known:
            raise OptionError(f"{path}: role {role!r} is unknown; {known_names(role, known, 3)}")


def _target(value: Any, where: str) -> Quantisation | None:
    if value == STORED:
        return None
    if isinstance(value, dict):
        mode, bits, group = value.get("mode", "affine"), value.get("bits"), value.get("group")
        if set(value) <= {"mode", "bits", "group"}:
            if mode == "affine" and type(bits) is int and bits in BITS and type(group) is int and group in GROUPS:
                return Quantisation(bits, group)
            if mode == "mxfp4" and bits in (None, 4) and group in (None, 32):
                return Quantisation(4, 32, "mxfp4", "uint8")
    raise OptionError(f"{where} is {value!r}; give 'stored', {{bits: {BITS}, group: {GROUPS}}} or {{mode: 'mxfp4'}}.")


def _override(policy: Policy, role: str, bits: int | None, option: str) -> Policy:
    if bits is None:
        return policy
    if bits not in CHOICES:
        raise OptionError(f"{option} is {bits!r}; give one of {', '.join(map(str, CHOICES))}.")
    return replace(policy, roles={**policy.roles, role: CHOICES[bits]}, forced=policy.forced | {role})


def load_policy(
    policy: str | Path | None = None, head_bits: int | None = None, embed_bits: int | None = None, tied: bool = False
) -> Policy:
    """A bundled policy by name or a JSON file by path, "int4" for None, with the two options applied. OptionError.

    A tied model has one matrix for both, so there either option sets it and two different ones are refused.
    """
    asked = policy is not None
    policy = DEFAULT if policy is None else policy
    if str(policy) in policies():
        path = _bundled(str(policy))
    elif user_path(policy).is_file():
        path = user_path(policy)
    else:
        raise OptionError(f"Policy {str(policy)!r} is neither a file nor one of {', '.join(policies())}.")
    try:
        roles = read_json(path).get("roles")
    except ConfigError as error:
        raise OptionError(str(error)) from None
    if not isinstance(roles, dict) or not roles:
        raise OptionError(f"{path} has no 'roles' object that maps a role to its precision.")
    _check_roles(roles, path)
    loaded = Policy(
        path.stem, {role: _target(value, f"{path}: role {role!r}") for role, value in roles.items()}, asked=asked
    )
    if tied:
        if head_bits is not None and embed_bits is not None and head_bits != embed_bits:
            raise OptionError(
                f"The head is tied to the embedding, so head_bits {head_bits} and embed_bits {embed_bits} must agree."
            )
        return _override(loaded, "embedding", embed_bits if head_bits is None else head_bits, "head_bits")
    return _override(_override(loaded, "head", head_bits, "head_bits"), "embedding", embed_bits, "embed_bits")
