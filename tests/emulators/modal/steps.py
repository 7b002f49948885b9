"""What tests do over and over in a sandbox."""


async def shell(sandbox, script, **options):
    """Exit code, output and errors of a script."""
    process = await sandbox.exec.aio("bash", "-c", script, **options)
    output, errors = await process.stdout.read.aio(), await process.stderr.read.aio()
    return await process.wait.aio(), output, errors
