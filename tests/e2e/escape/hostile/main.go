// Command hostile is what a hostile caller runs in a sandbox. `hostile run` makes every attack of its user, each in a process of its own,
// and prints one JSON line for each; other arguments are loads, which the harness measures from outside. An attack that succeeds does no
// damage to the node, but may change the namespaces of its container, so that it refuses to run elsewhere.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// attackTimeout is how long one attack may take.
const attackTimeout = 40 * time.Second

func main() {
	inherited := attack.Inherited() // before anything is opened
	env, err := attack.ParseEnv(config.Env(attack.EnvName))
	if err != nil {
		fail(err)
	}
	args := append(os.Args[1:], "")
	switch args[0] {
	case attack.ChildArg:
	case attack.PrivilegesArg:
		fmt.Println(attack.Privileges())
	case "run":
		inContainer()
		runAll(env, inherited.Run(env), args[1] == "first")
	case "attack":
		inContainer()
		a, err := attack.Named(args[1])
		if err != nil {
			fail(err)
		}
		report(a.Run(env))
	case attack.ReadArg:
		report(attack.Read(env, os.Args[2:]))
	default:
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		if err := load.Run(ctx, os.Stdout, env, os.Args[1:]); err != nil && !errors.Is(err, context.Canceled) {
			stop()
			fail(err)
		}
	}
}

// inContainer ends the program unless it runs from its image.
func inContainer() {
	if path, err := os.Executable(); err != nil || path != attack.Program {
		fail(fmt.Errorf("attacks are made in a container of their own, by %s: %w", attack.Program, err))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "hostile:", err)
	os.Exit(1)
}

func report(o suite.Outcome) {
	if err := json.NewEncoder(os.Stdout).Encode(o); err != nil {
		fail(err)
	}
}

// runAll makes all attacks of the user that runs this.
func runAll(env *attack.Env, inherited suite.Outcome, isFirst bool) {
	user := attack.Root
	if os.Geteuid() != 0 {
		user = attack.Mere
	}
	for _, a := range attack.For(user, isFirst) {
		if a.Name == inherited.Name {
			report(inherited)
			continue
		}
		report(runOne(a.Name, env))
	}
}

// runOne makes an attack in a process of its own, so that one that is killed or hangs is only its own failure.
func runOne(name string, env *attack.Env) suite.Outcome {
	ctx, cancel := context.WithTimeout(context.Background(), attackTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "attack", name)
	cmd.Args[0] = attack.Program
	cmd.Env = append(os.Environ(), attack.EnvName+"="+env.String())
	cmd.WaitDelay = time.Second
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var o suite.Outcome
	if jsonErr := json.Unmarshal(out, &o); jsonErr == nil && o.Name == name {
		return o
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && !exit.Exited() && ctx.Err() == nil {
		return suite.NewOutcome(name, "", "", fmt.Errorf("the process was ended: %w", err)) // by the kernel or by the filter
	}
	return suite.NewOutcome(name, "", "", suite.Brokenf("%w: %.200s %.200s", errors.Join(err, ctx.Err()), out, stderr.String()))
}
