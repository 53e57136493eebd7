"""What is wrong with an option of ``fastio fit``, in one line, with the name that was probably meant.

jsonargparse says it in many lines, one for each type that a value might have had. Their words are no promise of it: a
text that is not recognised here is left to stand by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger

_ARGUMENT = r"class_path '(.+)':\s+(?:Validation failed: )?(?:Option|Key) '(.+)' is not (?:accepted|expected)"
_ATTRIBUTE = r"class_path '.+':\s+module '(.+)' has no attribute '(.+)'"
_MODULE = r"class_path '(.+)':\s+No module named '(.+)'"
_CLASS = r"Expected a dot import path string: (\S+)"
_OPTION = r"(?:Group '(?P<group>.+)' does|Subcommand '.+' does) not accept (?:option|nested key) '(?P<name>.+)'"
_TOP = r"^(?:Validation failed: )?(?:Option|Key) '(?P<name>.+)' is not (?:accepted|expected)"
_NO_MODEL = r"(?:are required: |Key \")(?:\w+\.)?model\b"
_UNKNOWN = r"[Uu]nrecognized arguments: --(?P<name>[\w.]+)"
_FILE = r"[Uu]nrecognized arguments: (\S+\.(?:ya?ml|json))"


def cause_of(message: str, options: str) -> str | None:
    """The cause that an error of jsonargparse names.

    Args:
        message: Its text.
        options: A text with the options that there are, such as ``parser.format_usage()``.

    Returns:
        One line; None where the cause is neither a name that there is not, nor a model or a -c that was left out.
    """
    if found := re.search(_ARGUMENT, message):
        return f"{found[1]} has no argument {found[2]!r}" + _meant(found[2], _arguments_of(found[1]))
    if found := re.search(_ATTRIBUTE, message):
        return f"{found[1]} has no class {found[2]!r}" + _meant(found[2], dir(resolve_name(found[1])))
    if found := re.search(_MODULE, message):
        return f"there is no module {found[2]!r}, where {found[1]} was looked for"
    if found := re.search(_CLASS, message):
        bases = (LightningModule, LightningDataModule, Callback, Logger)
        names = [each.__name__ for base in bases for each in _subclasses(base)]
        path = "; a class of your own needs the path of its module, as in my_project.MyModel"
        return f"there is no class {found[1]!r}" + (_meant(found[1], names) or path)
    for pattern in (_OPTION, _TOP, _UNKNOWN):
        if found := re.search(pattern, message):
            group = found.groupdict().get("group")
            return _no_option(f"{group}.{found['name']}" if group else found["name"], _names(options))
    if found := re.search(_FILE, message):
        return f"a configuration file needs -c before it: -c {found[1]}"
    if re.search(_NO_MODEL, message):
        return "which model? Give --model=my_project.MyModel, or a configuration file that names it: -c config.yaml"
    return None


def _no_option(name: str, names: Sequence[str]) -> str:
    start, starts = name.partition(".")[0], {each.partition(".")[0] for each in names}
    if start not in starts:
        return f"there is no option --{start}" + _meant(start, starts, prefix="--")
    return f"there is no option --{name}" + _meant(name, names, prefix="--")


def _meant(name: str, names: Iterable[str], prefix: str = "") -> str:
    close = get_close_matches(name, list(names), 1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _names(options: str) -> list[str]:
    return re.findall(r"--([\w.]+)", options)


def _arguments_of(class_path: str) -> list[str]:
    made_by = resolve_name(class_path)
    parser = ArgumentParser(add_help=False)
    if isinstance(made_by, type):
        parser.add_class_arguments(made_by)
    return _names(parser.format_usage())


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)
