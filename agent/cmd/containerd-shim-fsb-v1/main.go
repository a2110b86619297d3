// Command containerd-shim-fsb-v1 is a containerd shim that starts sandbox-init itself, without an OCI runtime. Agents install it on their nodes
// and name it by its path.
package main

import (
	"context"
	"os"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/command"
)

func main() { os.Exit(command.Run(context.Background(), os.Args[1:])) }
