# The tasks live in the package, so that other repositories can use them too.
from trainkit.cli.tasks import namespace  # noqa: F401
