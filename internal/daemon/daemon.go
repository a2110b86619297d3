// Package daemon is what every server process shares: its flags, the order in which its parts start and end, and the
// frame of its main function. It runs once for each process.
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
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// EnvPrefix is the prefix of the environment variables that stand for flags.
const EnvPrefix = "FSB"

// version is set by the linker: -X github.com/fast-sandbox/fast-sandbox/internal/daemon.version=...
var version = "dev"

// Version is the version of this build.
func Version() string { return version }

// Common are the settings that every daemon has.
type Common struct {
	TLS rpc.TLS
	// MetricsAddress serves /metrics; HealthAddress the plaintext gRPC health service for probes. "0" turns one off.
	MetricsAddress, HealthAddress string
	// Profiling serves profiles beside the metrics.
	Profiling bool
	// Verbosity of logs.
	Verbosity int
}

// AddFlags adds the flags of c, with its present values as defaults where they are set.
func (c *Common) AddFlags(fs *pflag.FlagSet) {
	if c.MetricsAddress == "" {
		c.MetricsAddress = ":9091"
	}
	if c.HealthAddress == "" {
		c.HealthAddress = ":8081"
	}
	c.TLS.AddFlags(fs)
	fs.StringVar(&c.MetricsAddress, "metrics-bind-address", c.MetricsAddress, "`address` of the Prometheus endpoint; 0 turns it off")
	fs.BoolVar(&c.Profiling, "profiling", c.Profiling, "serve profiles (/debug/pprof/) beside the metrics")
	fs.StringVar(&c.HealthAddress, "health-probe-bind-address", c.HealthAddress, "`address` of the plaintext gRPC health service for probes; 0 turns it off")
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

// Serve adds the metrics endpoint and the health probe to a group, as dependencies: they are the last to go.
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

// Program is a daemon's main.
type Program struct {
	// Name of the binary and of the service in traces; Short and Long for --help; Example of a command line.
	Name, Short, Long, Example string
	// Config is filled from flags, environment and file before Run.
	Config Config
	// Run runs until ctx ends. ctx carries the logger.
	Run func(ctx context.Context) error
}

// Main runs p as the whole process: it parses, validates, logs, handles SIGTERM and SIGINT, and exits: 0 after an
// orderly end, 2 on wrong usage, 1 on any other error.
func Main(p Program) {
	os.Exit(run(p, os.Args[1:]))
}

// usageError marks what is wrong with the command line, as against what went wrong later.
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
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "%s: %v\nrun '%s --help' for usage\n", p.Name, err, p.Name)
		return 2
	default:
		fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		return 1
	}
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
	log.Info("starting", "service", p.Name, "version", version)
	err = p.Run(ctx)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if flushErr := flush(stop); flushErr != nil {
		log.V(2).Info("flushing traces", "err", flushErr.Error())
	}
	log.Info("stopped", "service", p.Name)
	return err
}
