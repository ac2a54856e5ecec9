#!/bin/bash
# Two hosts on one machine, as network namespaces joined by a cable (root): `host_shell.sh --up NAME`, `--down NAME`. Called as
# mpirun's remote shell (`host_shell.sh HOST COMMAND`) it runs a command on one of them; NAME is then LM_HOSTS in the environment.
case $1 in
--up)
  ip netns add "$2A" && ip netns add "$2B" && ip link add vA netns "$2A" type veth peer name vB netns "$2B" || exit 1
  ip -n "$2A" addr add 10.77.0.1/24 dev vA && ip -n "$2B" addr add 10.77.0.2/24 dev vB || exit 1
  for host in A B; do ip -n "$2$host" link set lo up && ip -n "$2$host" link set v$host up || exit 1; done
  exit ;;
--down)
  ip netns del "$2A"
  ip netns del "$2B"
  exit ;;
10.77.0.1) host=${LM_HOSTS}A ;;
10.77.0.2) host=${LM_HOSTS}B ;;
*) echo "host_shell.sh: unknown host $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec "$host" bash -c "$*"
