"""What survives a crash: the record of every host, who owns it, and the removal of what nobody owns."""
