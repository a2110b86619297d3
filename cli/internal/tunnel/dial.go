package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/transport/websocket"
	"k8s.io/streaming/pkg/httpstream"
	streamspdy "k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	pingPeriod = 10 * time.Second
	// overWebSocket is the name of the port-forward protocol in a WebSocket.
	overWebSocket = "SPDY/3.1+" + portforward.PortForwardProtocolV1Name
)

// Dial connects to a port of a Pod through the API server and the kubelet of the node: over a WebSocket, or over SPDY if the
// WebSocket is refused, as kubectl does. It blocks until the tunnel is open or ctx ends. If no process listens on the port, the
// first Read fails. Deadlines of the connection have no effect; Close ends Read and Write.
func (c *Cluster) Dial(ctx context.Context, p Pod, port int32) (net.Conn, error) {
	link, err := c.connect(ctx, p)
	if err != nil {
		return nil, err
	}
	conn, err := open(link, p, port)
	if err != nil {
		_ = link.Close()
		return nil, fault.New(errdefs.ErrUnavailable, ReasonPod, "connecting to Pod %s: %s", p.Name, err)
	}
	return conn, nil
}

// connect opens a tunnel.
func (c *Cluster) connect(ctx context.Context, p Pod) (httpstream.Connection, error) {
	doing := "port-forwarding to Pod " + p.Name
	target := c.core.Post().Resource("pods").Namespace(p.Namespace).Name(p.Name).SubResource("portforward").URL()
	link, err := byWebSocket(ctx, c.config, target)
	var upgrade *httpstream.UpgradeFailureError
	if !errors.As(err, &upgrade) {
		if err != nil {
			return nil, refused(doing, err)
		}
		return link, nil
	}
	// The API server is old, a proxy is in between, or the user may only create port-forwards: SPDY uses POST.
	link, err = bySPDY(ctx, c.config, target)
	if err != nil {
		return nil, refused(doing, preferred(err, upgrade))
	}
	return link, nil
}

// preferred returns the API server's answer to the WebSocket, which has a class, instead of the error of SPDY, which has none. If
// only the WebSocket is forbidden, it returns the error of SPDY.
func preferred(err error, first *httpstream.UpgradeFailureError) error {
	var answer *apierrors.StatusError
	if !errors.As(first.Cause, &answer) || apierrors.IsForbidden(answer) && !strings.Contains(err.Error(), "forbidden") {
		return err
	}
	return answer
}

func byWebSocket(ctx context.Context, config *rest.Config, target *url.URL) (httpstream.Connection, error) {
	transport, holder, err := websocket.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, err
	}
	conn, err := websocket.Negotiate(transport, holder, req, overWebSocket)
	if err != nil {
		return nil, err
	}
	return streamspdy.NewClientConnectionWithPings(portforward.NewTunnelingConnection("fsb-ctl", conn), pingPeriod)
}

func bySPDY(ctx context.Context, config *rest.Config, target *url.URL) (httpstream.Connection, error) {
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target.String(), nil)
	if err != nil {
		return nil, err
	}
	link, _, err := spdy.NegotiateStreaming(upgrader, &http.Client{Transport: transport}, req, portforward.PortForwardProtocolV1Name)
	return link, err
}

// open opens the two streams of one connection: the data and the errors of the kubelet.
func open(link httpstream.Connection, p Pod, port int32) (*conn, error) {
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	failures, err := link.CreateStream(headers)
	if err != nil {
		return nil, fmt.Errorf("opening a stream: %w", err)
	}
	_ = failures.Close() // the client sends nothing on it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := link.CreateStream(headers)
	if err != nil {
		return nil, fmt.Errorf("opening a stream: %w", err)
	}
	c := &conn{link: link, data: data, address: address(fmt.Sprintf("%s/%s:%d", p.Namespace, p.Name, port)), ended: make(chan struct{})}
	go c.readErrors(failures)
	return c, nil
}
