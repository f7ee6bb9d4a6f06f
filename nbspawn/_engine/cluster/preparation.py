"""What nodes need before ranks start there, or run a command: the user's modules, a meeting point, a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbspawn._engine.cluster.agents import Agents
from nbspawn._engine.cluster.nodes import Node, Nodes
from nbspawn._engine.cluster.own_modules import OwnModules, Texts
from nbspawn._engine.options import LaunchOptions
from nbspawn.errors import StartError

_TAKEN_SECONDS = 60.0  # for what is on its way to be written, after the last of it has left


def send_modules(
    modules: OwnModules, nodes: Nodes, are_new: bool, cancelled: Callable[[], object] = bool
) -> tuple[str, ...]:
    """Send nodes that lack them the user's own modules, or those that have changed; ``are_new``: no ranks have been
    started yet. Returns notes for the user. Raises StartError, and KeyboardInterrupt if that is ``cancelled``."""
    files = modules.changed() if modules.wanted else None
    notes = []
    own = next(
        ((node, path) for node in nodes if files and (path := modules.has_of_its_own(node.link.node, files))), None
    )
    if own and are_new:
        files = own = None  # they differ by now
    elif own:
        node, path = own
        notes.append(
            f"{path} has changed here, but {node.link.host} has its own, which its ranks keep: start them anew."
        )
    if files is None:
        folders = modules.folders()
        modules.wanted = {}
        answers = nodes.ask("use_folders", folders)
        for node, answer in zip(nodes, answers, strict=True):
            _check(node, "" if isinstance(answer, list) else answer)
        modules.wanted = {node.link.node: answer for node, answer in zip(nodes, answers, strict=True)}
        files = {number: modules.contents(number) for number in range(len(folders)) if modules.is_wanted(number)}

    lacking: dict[int, dict[int, Texts]] = {}
    for number, texts in files.items():
        for each in nodes:
            if texts and modules.wanted[each.link.node][number]:
                lacking.setdefault(each.link.node, {})[number] = texts
    to = [each for each in nodes if each.link.node in lacking]
    taken = nodes.ask_each("write_files", lambda one: (lacking[one.link.node],), to, _TAKEN_SECONDS, cancelled)
    if own or cancelled() or any(answer != "" for answer in taken):
        modules.wanted = {}  # next time they are asked again
    if cancelled():
        raise KeyboardInterrupt
    for node, answer in zip(to, taken, strict=True):
        _check(node, answer)
        sent = [text for texts in lacking[node.link.node].values() for text in texts.values() if text is not None]
        what = "1 module was" if len(sent) == 1 else f"{len(sent)} modules were"
        notes.append(f"{what} sent to {node.link.host} ({sum(map(len, sent)) / 1e3:,.1f} KB).")
    return tuple(notes)


def _check(node: Node, refusal: str | None) -> None:
    if refusal != "":
        why = refusal or node.link.lost or "it does not answer"
        raise StartError(f"{node.link.host} has not taken the notebook's modules: {why}")


def meeting_point(agents: Agents, nodes: Nodes) -> tuple[str, int]:
    """The first node's store, which all others reach, as the first reaches them. Raises StartError."""
    first, *others = nodes
    (answer,) = nodes.ask("serve_store", only=first)
    if answer is None:
        why = agents.why(first.link) or "it does not answer"
        raise StartError(f"the node {first.link.host} does not serve the ranks' store: {why}")
    listening = nodes.ask_each("listen", lambda _: (), others)

    def to_reach(node: Node) -> tuple[list[Any]]:
        return ([address for address in listening if address] if node is first else [answer],)

    for node, reasons in zip(nodes, nodes.ask_each("reach", to_reach), strict=True):
        for number, why in enumerate(reasons or ()):
            host, port = to_reach(node)[0][number]
            if why:
                other = others[listening.index((host, port))] if node is first else first
                raise StartError(
                    f"{node.link.host} does not reach {other.link.host} at {host}, port {port}: {why}. The ranks of "
                    "several hosts connect to each other, at any port: allow that in the firewall between them"
                )
    return str(answer[0]), int(answer[1])


def unreachable(nodes: Nodes) -> list[str]:
    """Which of them do not reach which others, and why."""
    found = []
    for node in nodes:
        others = [other for other in nodes if other is not node]
        (address,) = nodes.ask("listen", only=node)
        reached = nodes.ask_each("reach", lambda _, address=address: ([address],), others)  # type: ignore[misc]
        for other, reasons in zip(others, reached, strict=True):
            why = reasons[0] if reasons else "it does not answer"
            if why:
                found.append(f"{other.link.host} does not reach {node.link.host} at {address[0]}: {why}")
    return found


def backend(nodes: Nodes, options: Callable[[Node], LaunchOptions]) -> str:
    """The one for 'auto': which nodes choose for ``options`` of their own, if all choose the same."""
    chosen = set(nodes.ask_each("backend", lambda node: (options(node),)))
    return chosen.pop() if len(chosen) == 1 and None not in chosen else "gloo"
