#!/bin/sh
# A script that does not end is ended.
# waits: mostly
# limit: 3
# ends: limit
sleep 1000
