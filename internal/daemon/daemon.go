// Package daemon is the main function of every server process: common flags, configuration, telemetry, signals and exit
// codes, and the order in which the parts of a process start and stop (Group). It knows nothing about what a process serves.
// It runs once for each process, from its main goroutine.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// EnvPrefix is the prefix of the environment variables that set flags.
const EnvPrefix = "FSB"

// version is set by the linker: -X github.com/fast-sandbox/fast-sandbox/internal/daemon.version=...
var version = "dev"

// Version returns the version of this build.
func Version() string { return version }

// Common holds the settings that all daemons have.
type Common struct {
	TLS rpc.TLS
	// MetricsAddress serves /metrics; HealthAddress serves the plaintext gRPC health service for probes. "0" disables either.
	MetricsAddress, HealthAddress string
	// Profiling serves profiles on the metrics address.
	Profiling bool
	// Verbosity of logs.
	Verbosity int
}

// AddFlags adds the flags of c. Its current values are the defaults where they are set.
func (c *Common) AddFlags(fs *pflag.FlagSet) {
	if c.MetricsAddress == "" {
		c.MetricsAddress = ":9091"
	}
	if c.HealthAddress == "" {
		c.HealthAddress = ":8081"
	}
	c.TLS.AddFlags(fs)
	fs.StringVar(&c.MetricsAddress, "metrics-bind-address", c.MetricsAddress, "`address` of the Prometheus endpoint; 0 disables it")
	fs.BoolVar(&c.Profiling, "profiling", c.Profiling, "serve profiles (/debug/pprof/) on the metrics address")
	fs.StringVar(&c.HealthAddress, "health-probe-bind-address", c.HealthAddress, "`address` of the plaintext gRPC health service for probes; 0 disables it")
	fs.IntVarP(&c.Verbosity, "verbosity", "v", c.Verbosity, "verbosity of logs: 0 state changes, 2 details, 4 debugging")
	config.AddFileFlag(fs)
}

// Validate returns every problem, each naming its flag.
func (c *Common) Validate() []error {
	problems := c.TLS.Validate()
	if c.Verbosity < 0 || c.Verbosity > 10 {
		problems = append(problems, fmt.Errorf("--verbosity is %d, want 0 to 10", c.Verbosity))
	}
	return problems
}

// Serve adds the metrics endpoint and the health probe to a group as dependencies, so they stop last.
func (c *Common) Serve(g *Group, gatherer prometheus.Gatherer, health healthv1.HealthServer) {
	g.After("metrics", func(ctx context.Context) error { return obs.ServeMetrics(ctx, c.MetricsAddress, gatherer, c.Profiling) })
	g.After("health", func(ctx context.Context) error { return rpc.ServeHealth(ctx, c.HealthAddress, health) })
}

// Config is a daemon's settings.
type Config interface {
	// AddFlags adds the flags, with their defaults.
	AddFlags(fs *pflag.FlagSet)
	// Validate returns every problem at once, each naming its flag.
	Validate() error
}

// Program describes a daemon.
type Program struct {
	// Name of the binary and of the service in traces; Short, Long and Example for --help.
	Name, Short, Long, Example string
	// Config is set from flags, environment and file, and validated, before Run.
	Config Config
	// Run runs until ctx ends. ctx carries the logger. After leader.ErrLeadershipLost the process starts again, in place: as a new
	// program in the same container, so that it need not wait for the kubelet, which delays each restart more than the last.
	Run func(ctx context.Context) error
}

// Main runs p as the whole process and exits: with 0 after an orderly shutdown by SIGTERM or SIGINT, with 2 after a usage
// error, and with 1 after any other error. After a lost leadership it starts again instead.
func Main(p Program) {
	os.Exit(run(p, os.Args[1:]))
}

// usageError marks an error of the command line, the environment or the configuration file.
type usageError struct{ error }

func run(p Program, args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	cmd := &cobra.Command{
		Use: p.Name, Short: p.Short, Long: p.Long, Example: p.Example, Version: version, Args: cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := config.Load(cmd, EnvPrefix); err != nil {
				return usageError{err}
			}
			if err := p.Config.Validate(); err != nil {
				return usageError{err}
			}
			return start(cmd, p)
		},
	}
	p.Config.AddFlags(cmd.Flags())
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, leader.ErrLeadershipLost) && ctx.Err() == nil:
		err = again()
		fmt.Fprintf(os.Stderr, "%s: starting again: %v\n", p.Name, err)
		return 1
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "%s: %v\nrun '%s --help' for usage\n", p.Name, err, p.Name)
		return 2
	default:
		fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		return 1
	}
}

// again replaces the program by a new run of itself. It returns if that fails.
func again() error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the executable: %w", err)
	}
	return fmt.Errorf("executing %s: %w", self, syscall.Exec(self, os.Args, config.Environ(""))) //nolint:gosec // this program, as it was started
}

func start(cmd *cobra.Command, p Program) error {
	verbosity, err := cmd.Flags().GetInt("verbosity")
	if err != nil {
		return err
	}
	ctx, flush, err := obs.Setup(cmd.Context(), obs.Options{Service: p.Name, Version: version, Verbosity: verbosity})
	if err != nil {
		return err
	}
	log := logr.FromContextOrDiscard(ctx)
	log.Info("starting", obs.KeyService, p.Name, obs.KeyVersion, version)
	err = p.Run(ctx)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if flushErr := flush(stop); flushErr != nil {
		log.V(2).Info("exporting the remaining spans failed", obs.KeyError, flushErr.Error())
	}
	if errors.Is(err, leader.ErrLeadershipLost) {
		log.Info("another process leads; starting again", obs.KeyError, err.Error())
	}
	log.Info("stopped", obs.KeyService, p.Name)
	return err
}
