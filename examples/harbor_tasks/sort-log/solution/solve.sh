#!/bin/bash
set -e
grep ' ERROR ' server.log | sort > errors.log
