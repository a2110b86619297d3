// Package daemon is the main function of every server process: common flags, configuration, telemetry, signals and exit
// codes, and the order in which the parts of a process start and stop (Group). It knows nothing about what a process serves.
// It runs once for each process, from its main goroutine.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	// MetricsAddress serves /metrics to clients of rpc.RoleMetrics. HealthSocket is the path of a unix socket for the gRPC health service,
	// which the subcommand probe asks. "0" disables either.
	MetricsAddress, HealthSocket string
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
	if c.HealthSocket == "" {
		c.HealthSocket = defaultHealthSocket
	}
	c.TLS.AddFlags(fs)
	fs.StringVar(&c.MetricsAddress, "metrics-bind-address", c.MetricsAddress, "`address` of the Prometheus endpoint, for clients with a certificate of role metrics; 0 disables it")
	fs.BoolVar(&c.Profiling, "profiling", c.Profiling, "serve profiles (/debug/pprof/) on the metrics address")
	fs.StringVar(&c.HealthSocket, healthSocketFlag, c.HealthSocket, "`path` of the unix socket of the gRPC health service, for probes; 0 disables it")
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
	g.After("metrics", func(ctx context.Context) error {
		secure, err := c.TLS.MetricsConfig()
		if err != nil {
			return err
		}
		listener, err := listenMetrics(c.MetricsAddress)
		if err != nil {
			return err
		}
		return obs.ServeMetrics(ctx, listener, gatherer, c.Profiling, secure)
	})
	g.After("health", func(ctx context.Context) error { return rpc.ServeHealth(ctx, c.HealthSocket, health) })
}

// Bounds of the connections to the metrics endpoint, which a few scrapers use.
const (
	maxMetricsConnections = 64
	maxMetricsPerHost     = 16
)

// listenMetrics returns a listener of bounded connections; nil for an address that disables metrics.
func listenMetrics(address string) (net.Listener, error) {
	if address == "" || address == "0" {
		return nil, nil //nolint:nilnil // no listener is a setting
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listening for metrics: %w", err)
	}
	return rpc.Limit(listener, maxMetricsConnections, maxMetricsPerHost), nil
}

// Config is a daemon's settings.
type Config interface {
	// AddFlags adds the flags, with their defaults.
	AddFlags(fs *pflag.FlagSet)
	// Validate returns every problem at once, each naming its flag.
	Validate() error
}

// Program describes a daemon. Beside running, it has the subcommand probe.
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
	cmd.AddCommand(probe(p.Name))
	cmd.CompletionOptions.DisableDefaultCmd = true
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
