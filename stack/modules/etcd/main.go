// Command etcd is etcd's server as its own main builds it; the upstream module cannot be built from outside.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
