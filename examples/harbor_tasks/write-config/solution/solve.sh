#!/bin/bash
set -e
echo "station=$STATION" > /etc/station.conf
cp /etc/station.conf .
