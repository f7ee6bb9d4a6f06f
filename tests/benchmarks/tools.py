"""nbspawn and its peers: how a user has each of them run a function of ``work.py`` on N ranks, from a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field

SCRIPT = "no variable of the notebook gets into a script"
DROPPED = "drops what functions return"
INTERACTIVE = "Lightning refuses: its process is a copy of an interactive one"


@dataclass(frozen=True)
class Tool:
    """``cells`` are run one after the other: ``{fn}``, ``{args}`` (expressions, or literals
    if ``literal``; ``{words}``: for a shell), ``{n}``, ``{here}`` (this folder).

    ``before`` and ``after`` are not timed. ``slow`` tools start ranks in seconds, and have fewer turns. ``cannot`` says
    why there is no figure, by the name of a task, and ``skips`` why none was measured.
    """

    name: str
    cells: tuple[str, ...]
    setup: str = ""
    after: str = ""
    values: str = ""
    """What the function returned, by rank."""
    needs: str = "torch"
    own_group: bool = False
    """Ranks can meet without a port of the user's choice."""
    literal: bool = False
    slow: bool = False
    cannot: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)


_START = "start_processes({fn}, ({args},), nprocs={n}, start_method={method!r})"

FORK = Tool(
    "bare torch, fork",
    (_START.replace("{method!r}", "'fork'"),),
    "from torch.multiprocessing import start_processes",
    cannot={"give": DROPPED, "step_lightning": INTERACTIVE},
)
AUTO = Tool(
    "nbspawn",
    ("%%spawn {n} -o VALUES\n{fn}(rank, {args})",),
    "%load_ext nbspawn\nfrom nbspawn._engine.start.forkserver import server",
    values="VALUES",
    needs="nbspawn",
    own_group=True,
)
"""The tasks in which ranks meet add ``-b gloo``."""

_PEERS = (
    Tool(
        "accelerate",
        ("notebook_launcher(ranked, ({fn}, {args}), num_processes={n})",),
        "from accelerate import notebook_launcher",
        needs="accelerate",
        own_group=True,
        cannot={"give": DROPPED},
    ),
    Tool(
        "bare torch, forkserver",
        (_START.replace("{method!r}", "'forkserver'").replace("{fn}", "work.{fn}"),),
        "from torch.multiprocessing import start_processes\nimport work",
        slow=True,
        cannot={"give": DROPPED},
    ),
    Tool(
        "bare torch, spawn",
        (_START.replace("{method!r}", "'spawn'").replace("{fn}", "work.{fn}"),),
        "from torch.multiprocessing import start_processes\nimport work",
        slow=True,
        cannot={"give": DROPPED},
    ),
    Tool(
        "torchrun",
        ("!torchrun --standalone --nproc-per-node {n} {here}/torchrun_work.py {fn} {words}",),
        own_group=True,
        literal=True,
        slow=True,
        cannot={"have": SCRIPT, "give": SCRIPT},
    ),
    Tool(
        "torchrunx",
        (
            "launcher = torchrunx.Launcher(hostnames=['localhost'], workers_per_host={n}, backend='gloo')\n"
            "ran = launcher.run(ranked, {fn}, {args})\n"
            "VALUES = [ran.rank(rank) for rank in range({n})]",
        ),
        "import torchrunx",
        values="VALUES",
        needs="torchrunx",
        own_group=True,
        slow=True,
    ),
    Tool(
        "ipyparallel",
        (
            "cluster = ipyparallel.Cluster(n={n})\n"
            "client = cluster.start_and_connect_sync()\n"
            "client[:].use_cloudpickle()\n"
            "ASKED = [client[rank].apply_async({fn}, rank, {args}) for rank in range({n})]\n"
            "VALUES = [one.get() for one in ASKED]",
        ),
        "import ipyparallel",
        after="cluster.stop_cluster_sync()",
        values="VALUES",
        needs="ipyparallel",
        slow=True,
    ),
    Tool(
        "Ray",
        (
            "ray.init(num_cpus={n})\n"
            "there = [ray.put(one) for one in ({args},)]\n"
            "VALUES = ray.get([ray.remote({fn}).remote(rank, *there) for rank in range({n})])",
        ),
        "import ray",
        after="ray.shutdown()",
        values="VALUES",
        needs="ray",
        slow=True,
    ),
    Tool(
        "nbdistributed",
        # Its first cell waits for 30 s in vain, says so, and returns.
        ("%dist_init -n {n}", "%%distributed\npass", "%%distributed\nimport work\nwork.{fn}(rank, {args})"),
        "%load_ext nbdistributed",
        after="%dist_shutdown",
        needs="nbdistributed",
        own_group=True,
        literal=True,
        slow=True,
        cannot={"have": "has no way to send a variable", "give": "has no way to bring a value back"},
    ),
)
TOOLS = (FORK, *_PEERS, AUTO)

_KEPT = "get_ipython().run_line_magic('load_ext', 'nbspawn')\n{}".format(
    "\n".join(f"get_ipython().run_cell_magic('spawn', '{n} --keep --name of{n}', 'pass')" for n in (4, 16))
)
EMPTY = Tool("an empty cell", ("pass",), _KEPT)
"""In the kernel whose ranks wait."""
WARM = (
    EMPTY,
    Tool(
        "ipyparallel %%px",
        ("%%px\npass",),
        "import ipyparallel\n"
        "cluster = ipyparallel.Cluster(n=4)\n"
        "client = cluster.start_and_connect_sync()\n"
        "client[:].activate()",
        needs="ipyparallel",
    ),
    Tool(
        "nbdistributed %%distributed",
        ("%%distributed\npass",),
        "%load_ext nbdistributed\n%dist_init -n 4\nget_ipython().run_cell_magic('distributed', '', 'pass')",
        needs="nbdistributed",
    ),
    Tool("nbspawn %%ranks, 4 ranks", ("%%ranks @of4\npass",), _KEPT, needs="nbspawn"),
    Tool("nbspawn %%ranks, 16 ranks", ("%%ranks @of16\npass",), _KEPT, needs="nbspawn"),
)
"""Tools whose ranks stay: a cell in four that live already."""
