package cmd_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
)

// fakeTunnels answers at port 7 as an echo that says "bye" when the client has finished, and refuses all other ports.
type fakeTunnels struct {
	tunnelv1.UnimplementedTunnelServiceServer
	mu      sync.Mutex
	streams int
	over    bool // the most that was ever unacknowledged was more than a window
}

func (f *fakeTunnels) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.streams
}

func (f *fakeTunnels) Tunnel(stream grpc.BidiStreamingServer[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]) error {
	f.mu.Lock()
	f.streams++
	f.mu.Unlock()
	var sending sync.Mutex
	send := func(id uint32, frame *tunnelv1.Frame) {
		frame.Connection = id
		sending.Lock()
		defer sending.Unlock()
		_ = stream.Send(&tunnelv1.TunnelResponse{Frame: frame})
	}
	unacknowledged := map[uint32]int64{} // by the client
	waiting := map[uint32][]byte{}
	finished := map[uint32]bool{}
	closed := func(id uint32, message string) {
		send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Closed_{Closed: &tunnelv1.Frame_Closed{Message: message, Refused: message != ""}}})
	}
	flush := func(id uint32) {
		for len(waiting[id]) > 0 && unacknowledged[id] < 256<<10 {
			n := min(len(waiting[id]), 60_000, int(256<<10-unacknowledged[id]))
			send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Data{Data: waiting[id][:n]}})
			send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Window{Window: int64(n)}})
			waiting[id] = waiting[id][n:]
			unacknowledged[id] += int64(n)
		}
		if finished[id] && len(waiting[id]) == 0 {
			send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Data{Data: []byte("bye")}})
			send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Finished_{Finished: &tunnelv1.Frame_Finished{}}})
			closed(id, "")
			finished[id] = false
		}
	}
	for first := true; ; first = false {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if first && m.GetName() != "web" {
			return fmt.Errorf("the first message names %q", m.GetName())
		}
		id := m.GetFrame().GetConnection()
		switch e := m.GetFrame().GetEvent().(type) {
		case *tunnelv1.Frame_Open_:
			if e.Open.GetPort() != 7 {
				closed(id, "nothing listens at the port")
				continue
			}
			send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Opened_{Opened: &tunnelv1.Frame_Opened{}}})
		case *tunnelv1.Frame_Data:
			waiting[id] = append(waiting[id], e.Data...)
			if len(waiting[id]) > 256<<10 {
				f.mu.Lock()
				f.over = true
				f.mu.Unlock()
			}
			flush(id)
		case *tunnelv1.Frame_Window:
			unacknowledged[id] -= e.Window
			flush(id)
		case *tunnelv1.Frame_Finished_:
			finished[id] = true
			flush(id)
		}
	}
}

// forwarding runs `port-forward web` with more arguments. It returns the local addresses, and what ends the command and returns its result.
func forwarding(t *testing.T, b *harness, args ...string) ([]string, *buffer, func() result, <-chan result) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, errs, done := &buffer{}, &buffer{}, make(chan result, 1)
	go func() {
		done <- b.runBoth(ctx, out, errs, append([]string{"port-forward", "web", "-o", "json"}, args...)...)
	}()
	list := struct {
		Forwards []struct{ Address, LocalPort, RemotePort any }
	}{}
	require.Eventually(t, func() bool { return json.Unmarshal([]byte(out.String()), &list) == nil }, 10*time.Second, time.Millisecond, "%s", errs)
	var addresses []string
	for _, f := range list.Forwards {
		addresses = append(addresses, fmt.Sprintf("%v:%v", f.Address, f.LocalPort))
	}
	stop := func() result { cancel(); return <-done }
	t.Cleanup(cancel)
	return addresses, errs, stop, done
}

// echo sends data, closes its side, and returns what came back.
func echo(t *testing.T, address string, data []byte) string {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	go func() { _, _ = conn.Write(data); _ = conn.(*net.TCPConn).CloseWrite() }()
	raw, _ := io.ReadAll(conn)
	return string(raw)
}

func tunneling(t *testing.T) (*harness, *fakeTunnels, *liveAllocator) {
	t.Helper()
	tunnels, w := &fakeTunnels{}, newLiveAllocator(0)
	w.sandboxes["web"] = running("web")
	f := w.fake()
	f.tunnels = tunnels
	f.get = func(_ context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		return &sandboxv1.GetSandboxResponse{Sandbox: running(in.GetName())}, nil
	}
	b := start(t, f)
	b.clock = clock.RealClock{}
	return b, tunnels, w
}

func TestPortForward(t *testing.T) {
	b, tunnels, _ := tunneling(t)
	addresses, errs, stop, _ := forwarding(t, b, ":7", ":9")
	require.Len(t, addresses, 2)
	big := make([]byte, 3<<20)
	_, _ = rand.Read(big)
	var wg sync.WaitGroup
	for range 8 { // at once, in one stream, each more than a window
		wg.Go(func() {
			if got := echo(t, addresses[0], big); got != string(big)+"bye" {
				t.Errorf("%d bytes came back", len(got))
			}
		})
	}
	require.Empty(t, echo(t, addresses[1], nil), "a connection that fails is closed")
	require.Eventually(t, func() bool { return strings.Contains(errs.String(), "to port 9: nothing listens at the port") }, 10*time.Second, time.Millisecond)
	wg.Wait()
	require.Equal(t, "ping"+"bye", echo(t, addresses[0], []byte("ping")), "the others continue")
	require.Equal(t, 1, tunnels.count())
	require.False(t, tunnels.over)
	r := stop()
	require.Zero(t, r.code, r.err)
	require.Equal(t, 1, strings.Count(r.err, "\n"), r.err)
	_, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addresses[0])
	require.Error(t, err, "the port is closed")
}

// TestPortForwardSlowReader: a local program that reads nothing does not hold up the other connections.
func TestPortForwardSlowReader(t *testing.T) {
	b, _, _ := tunneling(t)
	addresses, _, stop, _ := forwarding(t, b, ":7")
	slow, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addresses[0])
	require.NoError(t, err)
	defer slow.Close()
	written := make(chan struct{})
	go func() { defer close(written); _, _ = slow.Write(bytes.Repeat([]byte("x"), 64<<20)) }()
	for range 5 {
		require.Equal(t, "ping"+"bye", echo(t, addresses[0], []byte("ping")))
	}
	require.Zero(t, stop().code)
	<-written
}

func TestPortForwardReconnects(t *testing.T) {
	b, tunnels, w := tunneling(t)
	addresses, errs, stop, _ := forwarding(t, b, ":7")
	require.Equal(t, "one"+"bye", echo(t, addresses[0], []byte("one")))
	open, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addresses[0])
	require.NoError(t, err)
	defer open.Close()
	_, err = open.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(open, make([]byte, 1))
	require.NoError(t, err)

	b.stop()
	_, err = io.ReadAll(open)
	if err != nil {
		require.ErrorContains(t, err, "reset")
	}
	f := w.fake()
	f.tunnels = tunnels
	serve(t, f, b.authority, b.addr)
	require.Eventually(t, func() bool { return tunnels.count() >= 2 }, 20*time.Second, time.Millisecond)
	require.Equal(t, "two"+"bye", echo(t, addresses[0], []byte("two")))
	require.Contains(t, errs.String(), `the stream to sandbox "web" is lost and is opened again`)
	require.Contains(t, errs.String(), "the stream was lost")
	require.Zero(t, stop().code)
}

func TestPortForwardEndsWithTheSandbox(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*liveAllocator)
		code   int
		want   string
	}{
		"deleted":  {func(w *liveAllocator) { delete(w.sandboxes, "web") }, 3, `sandbox "web" was deleted (SANDBOX_NOT_FOUND)`},
		"replaced": {func(w *liveAllocator) { s := running("web"); s.Uid = "other"; w.sandboxes["web"] = s }, 3, `was deleted`},
		"exited":   {func(w *liveAllocator) { w.sandboxes["web"] = exited("web", 4) }, 5, `has ended with exit code 4 (PHASE_CONFLICT)`},
		"expired": {func(w *liveAllocator) {
			s := running("web")
			s.Status.Phase = sandboxv1.Phase_PHASE_EXPIRED
			w.sandboxes["web"] = s
		}, 5, `has expired`},
	} {
		t.Run(name, func(t *testing.T) {
			b, _, w := tunneling(t)
			_, _, _, done := forwarding(t, b, ":7")
			w.change(func() { tc.change(w) })
			r := <-done
			require.Equal(t, tc.code, r.code, r.err)
			require.Contains(t, r.err, tc.want)
		})
	}
	t.Run("reset", func(t *testing.T) {
		b, tunnels, w := tunneling(t)
		addresses, _, stop, _ := forwarding(t, b, ":7")
		require.Equal(t, "bye", echo(t, addresses[0], nil))
		w.change(func() { s := running("web"); s.Status.Attempt = 2; w.sandboxes["web"] = s })
		require.Eventually(t, func() bool { return tunnels.count() == 2 }, 10*time.Second, time.Millisecond)
		require.Equal(t, "bye", echo(t, addresses[0], nil))
		require.Zero(t, stop().code)
	})
}

func TestPortForwardRefuses(t *testing.T) {
	b, tunnels, _ := tunneling(t)
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for line, tc := range map[string]struct {
		code int
		want string
	}{
		"":                          {2, "NAME is missing"},
		"web":                       {2, "PORT is missing"},
		"web http":                  {2, `invalid port "http"`},
		"web 0":                     {2, `invalid port "0"`},
		"web 65536":                 {2, `invalid port "65536"`},
		"web 80:":                   {2, `invalid port "80:"`},
		"web 1:2:3":                 {2, `invalid port "1:2:3"`},
		"web :80 --address nowhere": {2, `--address is "nowhere"`},
		fmt.Sprintf("web %d:80", taken.Addr().(*net.TCPAddr).Port): {5, "LOCAL_PORT_UNAVAILABLE"},
	} {
		r := b.run(t, append([]string{"port-forward"}, strings.Fields(line)...)...)
		require.Equal(t, tc.code, r.code, "%s: %s", line, r.err)
		require.Contains(t, r.err, tc.want)
		require.Empty(t, r.out)
	}
	require.Zero(t, tunnels.count())
}
