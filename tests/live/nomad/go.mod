// Pins the Nomad that the live tests run, in the usual Go way; `make nomad` builds it. Nothing of it is shipped.
module hermes-rl/tests/live/nomad

go 1.24.7

require github.com/hashicorp/nomad v1.10.5

replace (
	github.com/hashicorp/hcl => github.com/hashicorp/hcl v1.0.1-nomad-1
	github.com/hashicorp/nomad/api => github.com/hashicorp/nomad/api v0.0.0-20250909143645-a3b86c697f38
)
