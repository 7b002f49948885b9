"""Hosts on machines where a program of ours starts and stops slot servers: this one, those of ssh, a job's nodes."""
