"""The pool: hosts, slots, leases and those who wait for them."""
