// Command bench measures Fast Sandbox beside its alternatives. `make bench` runs all of it; docs/performance.md explains the
// numbers.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/command"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if command.New().ExecuteContext(ctx) != nil {
		stop()
		os.Exit(1)
	}
}
