# Judges programs that may be hostile, one after the other. Each has a process that runs its tests, and a child of that
# process that runs the program. The child has neither the tests nor any file, and answers calls by values, so that a verdict
# depends on values alone. Nothing of a program or its tests is left to the next ones.
#
# Requests and answers are a length, 8 bytes little-endian, and as many bytes. A request is the program with its limit of
# processor time and a filter of system calls, then, read after the child has been made, the tests; an answer is the verdict.
import builtins, ctypes, json, os, resource, signal, sys

PLAIN = (type(None), bool, int, float, str)
MOST = 16 << 20
# Signals at the limit on processor time.
OVER = (signal.SIGKILL, signal.SIGXCPU)


def read(source, count):
    data = b''
    while len(data) < count:
        piece = os.read(source, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def size(source):
    return int.from_bytes(read(source, 8), 'little')


def receive(source):
    count = size(source)
    if count > MOST:
        raise EOFError
    return json.loads(read(source, count))


def send(target, message):
    data = json.dumps(message).encode()
    data = len(data).to_bytes(8, 'little') + data
    while data:
        data = data[os.write(target, data):]


def encode(value):
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind in (tuple, set, frozenset):
        return {'kind': kind.__name__, 'items': [encode(item) for item in value]}
    if kind is dict:
        return {'kind': 'dict', 'items': [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {'kind': kind.__name__, 'items': list(value)}
    if kind is complex:
        return {'kind': 'complex', 'items': [value.real, value.imag]}
    return {'kind': 'object', 'items': []}


class Opaque:
    """A value of a class that cannot be sent, equal to nothing."""


def decode(value):
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, items = value.get('kind'), [decode(item) for item in value.get('items', [])]
    if kind in ('tuple', 'set', 'frozenset', 'bytes', 'bytearray', 'dict'):
        return getattr(builtins, kind)(items)
    return complex(*items) if kind == 'complex' else Opaque()


def raised(error):
    # A class of the program exists only there: the nearest one of Python's stands for it.
    kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    arguments = encode(list(error.__reduce__()[1]))
    return {'raised': [type(error).__name__, str(error)[:200], kind.__name__, arguments]}


class Silence:
    encoding = 'utf-8'

    def write(self, text):
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def restrict(instructions):
    class Instruction(ctypes.Structure):
        _fields_ = [('code', ctypes.c_ushort), ('jt', ctypes.c_ubyte), ('jf', ctypes.c_ubyte), ('k', ctypes.c_uint)]

    class Filter(ctypes.Structure):
        _fields_ = [('length', ctypes.c_ushort), ('instructions', ctypes.POINTER(Instruction))]

    array = (Instruction * len(instructions))(*(Instruction(*each) for each in instructions))
    found = Filter(len(instructions), array)
    prctl = ctypes.CDLL(None).prctl
    # PR_SET_PDEATHSIG: it ends with the process of its tests. PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
    if prctl(1, signal.SIGKILL, 0, 0, 0) != 0 or prctl(22, 2, ctypes.byref(found), 0, 0) != 0:
        os._exit(9)


def run(program, calls, answers):
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = Silence()
    scope = {'__name__': '__main__'}
    restrict(program['filter'])
    try:
        exec(compile(program['source'], 'program', 'exec'), scope)
        answer = {}
    except BaseException as error:
        answer = raised(error)
    while True:
        send(answers, answer)
        name, arguments, named = decode(receive(calls))
        try:
            answer = {'value': encode(scope[name](*arguments, **named))}
        except BaseException as error:
            answer = raised(error)


class Ended(BaseException):
    """The program's process has ended, or does not keep to the protocol."""


def exception(name, message, kind, arguments):
    kind = getattr(builtins, kind, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        kind = Exception
    own = {'__str__': lambda self: message}
    try:
        return (kind if kind.__name__ == name else type(name, (kind,), own))(*arguments)
    except Exception:
        # Its arguments cannot be sent.
        return type(name, (Exception,), own)(message)


def answer_of(answers):
    try:
        answer = receive(answers)
        if 'raised' not in answer:
            return decode(answer.get('value'))
        name, message, kind, arguments = answer['raised']
        error = exception(str(name), str(message), str(kind), decode(arguments))
    except Exception:
        raise Ended('it ended early') from None
    raise error


def verdict(tests, child, answers, calls):
    try:
        answer_of(answers)
        if not tests:
            return 'passed', ''
        scope = {'__name__': '__main__'}
        # What the tests use beside the function comes from the reference.
        exec(compile(tests['reference'], 'reference', 'exec'), scope)

        def candidate(*arguments, **named):
            send(calls, encode((tests['entry_point'], list(arguments), named)))
            return answer_of(answers)

        scope[tests['entry_point']] = candidate
        exec(compile(tests['test'], 'test', 'exec'), scope)
        scope['check'](candidate)
    except AssertionError as error:
        return 'failed', str(error)
    except Ended as error:
        status = os.waitpid(child, 0)[1]
        is_over = os.WIFSIGNALED(status) and os.WTERMSIG(status) in OVER
        return 'timeout' if is_over else 'error', str(error)
    except BaseException as error:
        return 'error', type(error).__name__ + ': ' + str(error)
    return 'passed', ''


def judge(verdicts):
    size(0)  # of program and tests together
    program = receive(0)
    # SIGXCPU, which the program can ignore, then SIGKILL.
    seconds = program['seconds']
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    calls, to_calls = os.pipe()
    answers, to_answers = os.pipe()
    child = os.fork()
    if child == 0:
        # Among what is closed is stdin, which the tests come from.
        for number in range(32):
            if number not in (calls, to_answers):
                try:
                    os.close(number)
                except OSError:
                    pass
        try:
            run(program, calls, to_answers)
        finally:
            os._exit(0)
    os.close(calls)
    os.close(to_answers)
    tests = receive(0)
    sys.stdout = sys.__stdout__ = Silence()
    name, detail = verdict(tests, child, answers, to_calls)
    try:
        # It waits for calls, or is stuck.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except OSError:
        pass
    send(verdicts, [name, detail[:200]])


def main():
    while True:
        verdicts, to_verdicts = os.pipe()
        task = os.fork()
        if task == 0:
            judge(to_verdicts)
            os._exit(0)
        os.close(to_verdicts)
        try:
            found = receive(verdicts)
        except EOFError:
            found = None
        os.close(verdicts)
        status = os.waitpid(task, 0)[1]
        if found is None and os.WIFSIGNALED(status):
            # The program's answers were too much for its tests.
            found = ['timeout' if os.WTERMSIG(status) in OVER else 'error', 'its tests ended early']
        if found is None:
            # There is no request, or the tests end this process: so does all that runs here.
            break
        send(1, found)


main()
