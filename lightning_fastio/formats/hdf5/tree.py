"""What an HDF5 file holds: its datasets and sparse groups by path, and why others cannot be reached."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h5py

from lightning_fastio.errors import FormatError, SchemaError

SPARSE_MEMBERS = {"data", "indices", "indptr"}


@dataclass
class Tree:
    """The objects of a file that may become fields."""

    found: dict[str, Any] = field(default_factory=dict)
    """Path without a leading slash to an open dataset, or to the open group of a sparse matrix."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Path of a link that leads nowhere to the reason."""


def walk(file: h5py.File) -> Tree:
    """All datasets and sparse groups of a file, also behind soft and external links, in the order of their names."""
    tree = Tree()
    _walk_group(file["/"], "", tree, ())
    return tree


def find(file: h5py.File, name: str) -> tuple[Any, str]:
    """The object behind a field name, and the member of its records that the name ends with, or "".

    Raises:
        SchemaError: The file has no such dataset; the message lists near matches.
        FormatError: The name is a group, or a link that leads nowhere.
    """
    path = name.strip("/")
    cut = len(path)
    while cut > 0:
        found = _get(file, path[:cut])
        if isinstance(found, h5py.Dataset) or (cut == len(path) and found is not None):
            break
        cut = path.rfind(".", 0, cut)
    else:
        raise _unknown(file, name)
    if isinstance(found, h5py.Group) and not is_sparse(found):
        inside = ", ".join(repr(f"{path}/{each}") for each in list(found)[:10])
        raise FormatError(f"{file.filename}: {name!r} is a group; name a dataset in it: {inside or 'it is empty'}")
    if not isinstance(found, h5py.Dataset | h5py.Group):
        raise FormatError(f"{file.filename}: {name!r} is a {type(found).__name__.lower()}, not a dataset")
    return found, path[cut + 1 :]


def is_sparse(group: Any) -> bool:
    """Whether a group holds a compressed sparse matrix, as AnnData and 10x files store it."""
    return isinstance(group, h5py.Group) and set(group) >= SPARSE_MEMBERS


def _walk_group(group: Any, prefix: str, tree: Tree, above: tuple[tuple[int, ...], ...]) -> None:
    info = h5py.h5o.get_info(group.id)
    identity = (info.fileno, info.addr)
    if identity in above:  # A link leads back to a group above.
        return
    for name in group:
        path = f"{prefix}{name}"
        member = _get(group, name)
        if member is None:
            tree.unreachable[path] = _why_unreachable(group.file, path)
        elif isinstance(member, h5py.Dataset) or is_sparse(member):
            if not _is_bare_dimension(member):
                tree.found[path] = member
        elif isinstance(member, h5py.Group) and not name.startswith("#"):  # MATLAB's cells live in "#refs#".
            _walk_group(member, f"{path}/", tree, (*above, identity))


def _get(group: Any, name: str) -> Any:
    """The object with a name; None if there is none or a link leads nowhere."""
    try:
        return group[name]
    except (KeyError, OSError, ValueError):
        return None


def _is_bare_dimension(member: Any) -> bool:
    """Whether this is a NetCDF dimension that has no values of its own."""
    mark = member.attrs.get("NAME") if "NAME" in member.attrs else None
    return isinstance(mark, bytes) and mark.startswith(b"This is a netCDF dimension but not a netCDF variable")


def _links(file: h5py.File, path: str) -> Iterator[tuple[str, Any]]:
    """The soft and external links on the way to a path."""
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        head = "/".join(parts[:count])
        try:
            link = file.get(head, getlink=True)
        except (KeyError, OSError, ValueError, RuntimeError):
            return
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            yield head, link


def _why_unreachable(file: h5py.File, path: str) -> str:
    for head, link in _links(file, path):
        if isinstance(link, h5py.ExternalLink):
            beside = os.path.join(os.path.dirname(file.filename), link.filename)
            is_there = os.path.exists(link.filename) or os.path.exists(beside)
            what = f"has no {link.path!r}" if is_there else "is missing"
            return f"{head!r} is an external link to {link.path!r} in {link.filename!r}, a file that {what}"
        if _get(file, head) is None:
            return f"{head!r} is a link to {link.path!r}, which does not exist"
    return "it cannot be opened"


def _unknown(file: h5py.File, name: str) -> SchemaError | FormatError:
    reason = _why_unreachable(file, name.strip("/"))
    if reason != "it cannot be opened":
        return FormatError(f"{file.filename}: field {name!r} cannot be loaded: {reason}")
    names = list(walk(file).found)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:10]
    listed = ", ".join(repr(each) for each in near)
    return SchemaError(f"{file.filename}: there is no dataset {name!r}; the file has {listed or 'no dataset'}")
