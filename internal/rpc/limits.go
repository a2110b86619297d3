package rpc

import (
	"crypto/tls"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"k8s.io/apimachinery/pkg/util/cache"
)

// Limits bound what peers can hold of a server.
type Limits struct {
	// Connections is the number of open connections, PerHost that of one address. Further ones are closed at once.
	Connections, PerHost int
	// Handshake bounds the time until a connection is ready for calls.
	Handshake time.Duration
	// Calls is the number of calls that run at once on one connection; further ones wait at the client.
	Calls uint32
	// HeaderBytes is the size of the metadata of a call.
	HeaderBytes uint32
	// Age is how long a connection is used for new calls, and Grace how long its calls may continue after that. A client connects
	// again, so that certificates and rights that have ended take effect.
	Age, Grace time.Duration
	// Idle is how long a connection without calls is kept.
	Idle time.Duration
}

// DefaultLimits returns the limits of a server whose configuration has none. The gateway makes all calls of its users on one
// connection, so that Calls is far above what one user needs.
func DefaultLimits() Limits {
	return Limits{
		Connections: 16 << 10, PerHost: 4 << 10, Handshake: 10 * time.Second, Calls: 4 << 10, HeaderBytes: 64 << 10,
		Age: 30 * time.Minute, Grace: 10 * time.Minute, Idle: 15 * time.Minute,
	}
}

// options returns the options of a server. Both keepalive settings are those of all servers.
func (l Limits) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.WriteBufferSize(bulkWriteBuffer), grpc.ConnectionTimeout(l.Handshake), grpc.MaxConcurrentStreams(l.Calls), grpc.MaxHeaderListSize(l.HeaderBytes),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second, MaxConnectionAge: l.Age, MaxConnectionAgeGrace: l.Grace, MaxConnectionIdle: l.Idle,
		}),
	}
}

// Each address may open this many connections in a second on average and at once. Without a bound, handshakes alone take a processor.
// Users behind one address share it.
const (
	connectionRate  = 200
	connectionBurst = 1000
	// rateHosts bounds the addresses that are remembered, rateIdle is for how long: a bucket is full again before.
	rateHosts = 16 << 10
	rateIdle  = 10 * time.Second

	// maxStrangerCalls is how many calls of one connection may lack valid credentials before it is closed. What reads the frames of a
	// flood would otherwise take a processor. Such a connection counts as strangerCost: otherwise their handshakes would.
	maxStrangerCalls = 16
	strangerCost     = 20
)

// Limit returns a listener that closes connections at once: those beyond a number, in all and from one address, and those that one
// address opens too fast.
func Limit(l net.Listener, connections, perHost int) net.Listener {
	return newLimited(l, connections, perHost)
}

func newLimited(l net.Listener, connections, perHost int) *limitedListener {
	return &limitedListener{
		Listener: l, connections: connections, perHost: perHost, open: map[string]int{}, rates: cache.NewLRUExpireCache(rateHosts),
		conns: map[string]*limitedConn{},
	}
}

type limitedListener struct {
	net.Listener
	connections, perHost int

	mu    sync.Mutex
	total int
	open  map[string]int          // by the address of the peer, without its port
	rates *cache.LRUExpireCache   // *rate.Limiter, by the same
	conns map[string]*limitedConn // by the whole address
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host := conn.RemoteAddr().String()
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		limited := &limitedConn{Conn: conn, listener: l, host: host}
		limited.release = sync.OnceFunc(func() { l.release(host, limited) })
		if l.take(host, limited) {
			return limited, nil
		}
		_ = conn.Close()
	}
}

func (l *limitedListener) take(host string, conn *limitedConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total >= l.connections || l.open[host] >= l.perHost || !l.rate(host).Allow() {
		return false
	}
	l.total++
	l.open[host]++
	l.conns[conn.RemoteAddr().String()] = conn
	return true
}

// stranger counts a call without valid credentials, by the address of its connection, and closes a connection that has had too many.
func (l *limitedListener) stranger(address string) {
	l.mu.Lock()
	conn := l.conns[address]
	l.mu.Unlock()
	if conn != nil && l.strange(conn) {
		_ = conn.Close()
	}
}

func (l *limitedListener) strange(conn *limitedConn) (closing bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	conn.strangers++
	if conn.strangers == maxStrangerCalls {
		l.rate(conn.host).ReserveN(time.Now(), strangerCost-1)
	}
	return conn.strangers >= maxStrangerCalls
}

// Strange counts a call without valid credentials of a connection that Limit has accepted, TLS or not, and reports whether the
// connection has to end. Servers of this package need not call it.
func Strange(conn net.Conn) bool {
	if wrapped, ok := conn.(*tls.Conn); ok {
		conn = wrapped.NetConn()
	}
	limited, ok := conn.(*limitedConn)
	return ok && limited.listener.strange(limited)
}

// rate returns the bucket of an address. mu is held.
func (l *limitedListener) rate(host string) *rate.Limiter {
	bucket, ok := l.rates.Get(host)
	if !ok {
		bucket = rate.NewLimiter(connectionRate, connectionBurst)
	}
	l.rates.Add(host, bucket, rateIdle)
	return bucket.(*rate.Limiter)
}

func (l *limitedListener) release(host string, conn *limitedConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if address := conn.RemoteAddr().String(); l.conns[address] == conn {
		delete(l.conns, address)
	}
	l.total--
	if l.open[host]--; l.open[host] == 0 {
		delete(l.open, host)
	}
}

type limitedConn struct {
	net.Conn
	listener  *limitedListener
	host      string // address of the peer, without its port
	release   func()
	strangers int // calls without valid credentials; the listener's mutex guards it
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
