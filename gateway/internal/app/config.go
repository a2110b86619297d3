package app

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
)

// Config is the gateway's settings.
type Config struct {
	daemon.Common
	// Address to serve HTTPS on (host:port).
	Address string
	// AllocatorAddress is the gRPC target of the allocator.
	AllocatorAddress string
	// MaxBodyBytes is the largest request body that is taken.
	MaxBodyBytes int64
	// RequestTimeout is how long a request may take that asks for no shorter time; streams are exempt.
	RequestTimeout time.Duration
	// DrainTimeout is how long running requests may go on once the end has begun; streams are ended at once.
	DrainTimeout time.Duration
}

// AddFlags adds the flags, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Common.AddFlags(fs)
	fs.StringVar(&c.Address, "bind-address", ":8080", "`address` to serve HTTPS on")
	fs.StringVar(&c.AllocatorAddress, "allocator-address", "kubernetes:///allocator.fast-sandbox-system:9090",
		"gRPC `target` of the allocator")
	fs.Int64Var(&c.MaxBodyBytes, "max-body-bytes", 4<<20, "largest request body that is taken, in `bytes`")
	fs.DurationVar(&c.RequestTimeout, "request-timeout", 70*time.Second,
		"`time` that a request may take if it asks for no shorter one (Grpc-Timeout); streams are exempt")
	fs.DurationVar(&c.DrainTimeout, "drain-timeout", 10*time.Second, "`time` that running requests get once the gateway ends")
}

// Validate returns every problem at once, each naming its flag.
func (c *Config) Validate() error {
	problems := c.Common.Validate()
	for _, f := range []struct{ flag, value string }{{"bind-address", c.Address}, {"allocator-address", c.AllocatorAddress}} {
		if f.value == "" {
			problems = append(problems, fmt.Errorf("--%s is required", f.flag))
		}
	}
	if c.MaxBodyBytes < 1 || c.MaxBodyBytes > 64<<20 {
		problems = append(problems, fmt.Errorf("--max-body-bytes is %d, want 1 to %d", c.MaxBodyBytes, 64<<20))
	}
	if c.RequestTimeout <= 0 {
		problems = append(problems, fmt.Errorf("--request-timeout is %s, want more than 0", c.RequestTimeout))
	}
	if c.DrainTimeout < 0 {
		problems = append(problems, fmt.Errorf("--drain-timeout is %s, want 0 or more", c.DrainTimeout))
	}
	return errors.Join(problems...)
}
