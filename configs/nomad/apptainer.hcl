# A node of a cluster whose hosts run bare or in Apptainer images, without Docker (configs/nomad/apptainer.yaml):
#   nomad agent -config=configs/nomad/apptainer.hcl
# This file makes a client; the servers of the cluster are configured as their makers say.
# Set: the servers' addresses, the interface that pools reach, and a data directory on a fast local disk.

datacenter = "dc1"
data_dir   = "/var/lib/nomad"

disable_update_check = true

client {
  enabled           = true
  servers           = ["nomad-1.example:4647"]
  network_interface = "eth0"

  # Slot servers listen on ports of this range: open it for the machines that run pools, and keep it out of
  # net.ipv4.ip_local_port_range, or outgoing connections take ports that the scheduler has given away.
  min_dynamic_port = 20000
  max_dynamic_port = 32000

  # Each host leaves a folder behind until its node collects it.
  gc_max_allocs = 200

  options = {
    "driver.allowlist" = "raw_exec"
  }
}

plugin "raw_exec" {
  config {
    enabled = true
  }
}

acl {
  enabled = true
}
