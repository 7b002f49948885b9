"""What survives a crash: the record of every host and its owner, and the removal of hosts without one."""
