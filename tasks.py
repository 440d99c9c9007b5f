from trainkit.cli.tasks import namespace  # noqa: F401  the tasks live in the package, so that other repositories can use them too
