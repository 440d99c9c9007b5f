"""The Invoke tasks of trainkit. Each parses its options and calls one function of a package
below; what that needs is imported only then.

A repository of your own gets them with one line in its tasks.py: `from trainkit.cli.tasks import
namespace`.
"""

from __future__ import annotations

from invoke.collection import Collection

from trainkit.cli import tasks_config, tasks_hosts, tasks_inspect, tasks_run

namespace = Collection(
    tasks_config.init,
    tasks_config.jobs,
    tasks_config.show,
    tasks_config.check,
    tasks_config.plan,
    tasks_config.scale,
    tasks_config.coord_check,
    tasks_config.graph,
    tasks_config.import_,
    tasks_run.build,
    tasks_run.build_container,
    tasks_run.prep_data,
    tasks_config.data_stats,
    tasks_config.data_verify,
    tasks_config.data_why,
    tasks_run.precompile,
    tasks_run.rehearse,
    tasks_run.drill,
    tasks_run.diff_engines,
    tasks_run.train,
    tasks_run.sweep,
    tasks_run.resume,
    tasks_run.attach,
    tasks_run.cancel,
    tasks_inspect.runs,
    tasks_inspect.status,
    tasks_inspect.why,
    tasks_inspect.logs,
    tasks_hosts.nodes,
    tasks_hosts.doctor,
    tasks_hosts.setup_hosts,
    tasks_hosts.fleet,
    tasks_inspect.checkpoints,
    tasks_inspect.replay,
    tasks_inspect.tensorboard,
    tasks_inspect.report,
    tasks_inspect.compare,
    tasks_inspect.scaling_law,
    tasks_inspect.board,
    tasks_inspect.generate,
    tasks_inspect.evaluate,
    tasks_inspect.average,
    tasks_inspect.export,
    tasks_inspect.convert,
    tasks_inspect.clean,
    tasks_hosts.test,
    tasks_hosts.bench,
    tasks_hosts.docs,
)
