#!/bin/sh
# Two guests reach each other.
# kernels: 6.1+6.12
. /test/functions
if [ "$ROLE" = first ]; then
    echo "this came over the wire" | nc -l -p 7000
else
    wait_until 60 sh -c 'nc 10.7.0.1 7000 </dev/null >got && [ -s got ]'
    equal "what came" "$(cat got)" "this came over the wire"
fi
