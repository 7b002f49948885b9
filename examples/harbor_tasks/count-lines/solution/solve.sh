#!/bin/bash
set -e
wc -l < data.txt > count.txt
wc -w < data.txt > words.txt
