# Nomad on a laptop, one agent that is server and client, on loopback only:
#   nomad agent -dev -config=configs/nomad/dev.hcl
# Slots are isolated from namespaces only when the agent runs as root (sudo); otherwise at the strongest level that works.

disable_update_check = true

client {
  options = {
    # Looking for clouds costs seconds on a laptop.
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }
}

plugin "raw_exec" {
  config {
    enabled = true
  }
}

plugin "docker" {
  config {
    # Hosts that ask for `cap_add: [sys_admin, net_admin]` can build slots from namespaces without being privileged.
    allow_caps = ["all"]
  }
}
